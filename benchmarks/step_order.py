"""Does the time model put plans in the order in which they really run?

The machine is measured first (`autopar profile`); then the demo's model trains under every plan on
local gloo ranks. The plans take turns, one step each per round, so that whatever else the machine
does meets all of them alike; a plan's time is the median over rounds of its slowest rank, optimizer
included. Writes a section of benchmarks/RESULTS.md; every plan is printed, good or bad.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parent / "examples"))  # the model and its data are the demo's
sys.path.insert(0, str(ROOT / "validation"))
from comparison import spearman  # noqa: E402

import autopar  # noqa: E402
from autopar.api import chosen, search_program  # noqa: E402
from autopar.cluster import Cluster  # noqa: E402
from autopar.passes.capture import capture  # noqa: E402
from autopar.report.text import headline  # noqa: E402
from autopar.runtime.launch import spawn  # noqa: E402
from autopar.workflow.profiling import profile  # noqa: E402
from demo import BATCH, build_model, example  # noqa: E402
from results import machine, write_section  # noqa: E402

# For a number of ranks: plans that differ in axes, ZeRO, recomputation, micro-batches, schedule.
PINS = {
    2: (
        "dp=2,zero=0",
        "dp=2,zero=0,microbatch=1",
        "dp=2,zero=1",
        "dp=2,zero=2,microbatch=1",
        "dp=2,zero=3",
        "dp=2,zero=3,microbatch=1",
        "dp=2,zero=3,recompute=full",
        "tp=2,weights=split",
        "tp=2,weights=split,microbatch=2",
        "tp=2,weights=split,recompute=full",
        "pp=2,schedule=1f1b,microbatch=1",
        "pp=2,schedule=1f1b,microbatch=2",
        "pp=2,schedule=gpipe,microbatch=4",
        "pp=2,schedule=1f1b,microbatch=4",
        "pp=2,schedule=1f1b,microbatch=2,recompute=full",
        "pp=2,schedule=interleaved,chunks=2,microbatch=2",
        "pp=2,schedule=interleaved,chunks=2,microbatch=4",
        "pp=2,schedule=zero-bubble,chunks=1,microbatch=2",
        "pp=2,schedule=zero-bubble,chunks=2,microbatch=4",
        "pp=2,schedule=zbv,microbatch=2",
    ),
    4: (
        "dp=4,zero=0",
        "dp=4,zero=1",
        "dp=4,zero=3",
        "dp=4,zero=3,recompute=full",
        "dp=2,tp=2,zero=0,weights=split",
        "dp=2,tp=2,zero=3,weights=split,microbatch=1",
        "dp=2,pp=2,schedule=1f1b,zero=0,microbatch=1",
        "dp=2,pp=2,schedule=1f1b,zero=1,microbatch=2",
        "pp=2,tp=2,schedule=1f1b,weights=split,microbatch=1",
        "pp=2,tp=2,schedule=1f1b,weights=split,microbatch=4",
        "pp=4,schedule=1f1b,microbatch=1",
        "pp=4,schedule=gpipe,microbatch=2",
        "pp=4,schedule=1f1b,microbatch=1,recompute=full",
    ),
}
WARM_UP = 2


@dataclass(frozen=True)
class Measured:
    """A plan and the seconds of its step in every round."""

    plan: autopar.Plan
    seconds: tuple[float, ...]

    @property
    def predicted(self) -> float:
        return float(self.plan.predicted["step_seconds"])

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def measure_machine(seconds: float) -> str | None:
    """The cluster's TOML on rank 0."""
    found = profile(seconds=seconds, report=lambda what, part: None)
    return found.cluster.to_toml() if dist.get_rank() == 0 else None


def steps_on_rank(documents: Sequence[dict[str, Any]], rounds: int) -> list[list[float]]:
    """Seconds that this rank took for each round of every plan, from a common start."""
    torch.set_num_threads(1)
    batch = example()
    programs = []
    for document in documents:
        plan = autopar.Plan.from_dict(document)
        program = autopar.compile(
            build_model(), example_inputs=example(), global_batch_size=BATCH, plan=plan
        )
        programs.append((program, torch.optim.AdamW(list(program.parameters()), foreach=True)))
    taken: list[list[float]] = [[] for _ in programs]
    for number in range(WARM_UP + rounds):
        for (program, optimizer), times in zip(programs, taken, strict=True):
            dist.barrier()
            start = time.perf_counter()
            program.step(batch)
            optimizer.step()
            optimizer.zero_grad()
            if number >= WARM_UP:
                times.append(time.perf_counter() - start)
    return taken


def measure(plans: Sequence[autopar.Plan], ranks: int, rounds: int) -> list[Measured]:
    """All plans on `ranks` local ranks; of a round counts the slowest rank."""
    documents = [plan.to_dict() for plan in plans]
    limit = 120.0 + 3.0 * rounds * len(plans)
    by_rank = spawn(steps_on_rank, ranks, (documents, rounds), timeout_seconds=limit)
    slowest = [
        tuple(max(times) for times in zip(*(rank[i] for rank in by_rank), strict=True))
        for i in range(len(plans))
    ]
    return [Measured(p, s) for p, s in zip(plans, slowest, strict=True)]


def searched(cluster: Cluster, pins: Sequence[str]) -> list[autopar.Plan]:
    """The plan that the search chooses freely, then the other ones that `pins` give."""
    program = capture(build_model(), example(), name="small-llama", dtype=torch.float32)
    outcomes = (
        search_program(program, cluster, global_batch_size=BATCH, pins=each, explain=False)
        for each in ("", *pins)
    )
    found: dict[str, autopar.Plan] = {}
    for plan in map(chosen, outcomes):
        found.setdefault(str(plan.decisions()), plan)
    return list(found.values())


def lines(found: Sequence[Measured]) -> list[str]:
    """The table, fastest measured first; the chosen plan, the first of `found`, is marked."""
    table = [
        "| plan | predicted ms | measured ms (least) | error |",
        "| --- | ---: | ---: | ---: |",
    ]
    for m in sorted(found, key=lambda m: m.median):
        name = headline(m.plan) + (" — chosen by the search" if m is found[0] else "")
        measured = f"{1e3 * m.median:.1f} ({1e3 * min(m.seconds):.1f})"
        error = m.predicted / m.median - 1
        table.append(f"| {name} | {1e3 * m.predicted:.1f} | {measured} | {error:+.0%} |")
    return table


def verdict(found: Sequence[Measured]) -> str:
    """Order of all plans, and how far the chosen one is from the fastest."""
    order = spearman([m.predicted for m in found], [m.median for m in found])
    least = spearman([m.predicted for m in found], [min(m.seconds) for m in found])
    fastest = min(m.median for m in found)
    quickest = min(min(m.seconds) for m in found)
    return (
        f"Spearman's rank correlation over {len(found)} plans: {order:.2f} by medians, {least:.2f}"
        f" by the fastest rounds. The chosen plan takes\n{found[0].median / fastest - 1:+.1%}"
        f" ({min(found[0].seconds) / quickest - 1:+.1%} by fastest rounds) against the fastest."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, choices=sorted(PINS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=60.0, help="for measuring the machine")
    parser.add_argument("--cluster", type=Path, help="what `autopar profile` wrote before")
    arguments = parser.parse_args()
    ranks = arguments.ranks
    cluster = arguments.cluster
    if cluster is None:
        cluster = Path(tempfile.mkdtemp()) / "cluster.toml"
        limit = 3 * arguments.seconds + 120
        text = spawn(measure_machine, ranks, (arguments.seconds,), timeout_seconds=limit)[0]
        cluster.write_text(text, encoding="utf-8")
    plans = searched(Cluster.from_toml(cluster), PINS[ranks])
    before = os.getloadavg()[0]
    found = measure(plans, ranks, arguments.rounds)
    table = lines(found)
    print("\n".join([*table, verdict(found)]))
    write_section(
        f"Order of plans on {ranks} CPU ranks",
        [
            f"Made by `benchmarks/step_order.py --ranks {ranks}`: the demo's Llama, global batch"
            f" {BATCH}, float32, {arguments.rounds} rounds. {machine()}",
            f"Load of the machine before: {before:.1f}. {verdict(found)}",
            "",
            *table,
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
