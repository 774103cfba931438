"""How even experts get on ranks: Zipf loads, assigned by load and dealt out by turns.

Writes its section of benchmarks/RESULTS.md; exit code 1 if an assignment took 10 s or is further
from its bound than it may be.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass
from math import ceil

from autopar.experts.assignment import CLOSE, LayerAssignment, assign_experts
from results import machine, write_section

SECONDS = 10.0
ROWS = 1_000_000


@dataclass(frozen=True)
class Case:
    """Expert number i in the order of their loads gets 1 / i ** skew of the rows of the first."""

    experts: int
    ranks: int
    skew: float
    replicas: int = 0

    def load(self) -> list[int]:
        rows = [1 / (i + 1) ** self.skew for i in range(self.experts)]
        found = [round(ROWS * r / sum(rows)) for r in rows]
        random.Random(self.experts).shuffle(found)
        return found


def cases(quick: bool) -> list[Case]:
    sizes = [(64, 8), (64, 32), (128, 16), (128, 32), (256, 8), (256, 16), (256, 32), (256, 64)]
    found = [Case(e, r, skew) for e, r in sizes for skew in (0.3, 0.6, 1.0)]
    found += [Case(e, r, 1.0, r) for e, r in sizes]
    return found[::6] if quick else found


def run(case: Case) -> tuple[LayerAssignment, float]:
    start = time.perf_counter()
    load = {"layer": case.load()}
    found = assign_experts(load, case.ranks, replicas=case.replicas, time_limit=SECONDS / 2)
    return found.layers["layer"], time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few cases, nothing written")
    quick = parser.parse_args().quick
    lines = [
        "Rows of the busiest rank over the mean of all ranks: 1 is even. Expert i of a layer, in "
        "the order of loads, gets rows in proportion to 1 / i^skew. Neighbours: experts 0 to "
        "e / r on rank 0, as programs start; by turns: expert i on rank i mod r. At least: a "
        "bound under every assignment with equally many on each rank.",
        "",
        "| experts | ranks | skew | replicas | neighbours | by turns | assigned | at least | "
        "| seconds |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---|---:|",
    ]
    failed = []
    for case in cases(quick):
        layer, seconds = run(case)
        mean = sum(case.load()) / case.ranks
        over = [v / mean for v in (layer.contiguous, layer.round_robin, layer.busiest, layer.bound)]
        word = "optimal" if layer.optimal else f"within {ceil(1e4 * layer.gap) / 1e4:.2%}"
        cells = [case.experts, case.ranks, case.skew, case.replicas, *(f"{v:.3f}" for v in over)]
        lines.append(f"| {' | '.join(map(str, cells))} | {word} | {seconds:.2f} |")
        print(lines[-1], flush=True)
        far = not case.replicas and layer.gap > CLOSE
        if seconds >= SECONDS or far or layer.busiest > layer.round_robin:
            failed.append(case)
    lines += ["", f"Solver limit {SECONDS / 2:g} s a layer. {machine()}"]
    if not quick:
        write_section("Experts on ranks", lines)
    for case in failed:
        print(f"missed: {case}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
