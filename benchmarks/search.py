"""How long the search alone takes, how that grows, and what other formulations would take.

Writes its section of benchmarks/RESULTS.md; exit code 1 if a case misses its target or an answer
is not proven.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.search.enumerate import search
from autopar.search.options import SearchOptions
from autopar.search.result import SearchResult
from formulations import Timed, placement_formulations, stage_formulations
from planning import Case, Measured, measure
from results import machine, write_section
from search_chain import MadeUpChain

GIB = 2**30


@dataclass(frozen=True)
class Target:
    """A planning problem and how many seconds its search, and all before it, may take."""

    case: Case
    search_seconds: float
    before_seconds: float | None = None


TARGETS = (
    Target(Case("llama3-8b", "h100:8x8", 60, 4 * GIB), 5, 15),
    Target(Case("llama3-70b", "h100:32x8", 120, 4 * GIB, global_batch=1024), 15),
    Target(Case("llama3-405b", "h100:2048x8", 120, 4 * GIB, global_batch=16384), 30, 45),
    Target(Case("gpt3-175b", "a100-80:128x8", 120, 4 * GIB, 2048, 1536), 15),
)
LONG_SECONDS = 60.0
WIDTHS = (2048, 3072, 4096, 5120, 6144, 8192)


def made_up(cluster: str, layers: int, widths: tuple[int, ...]) -> tuple[SearchResult, float]:
    """Search a made-up chain; its global batch is twice the number of ranks."""
    on = Cluster.parse(cluster)
    chain = MadeUpChain(on, layers, widths)
    options = SearchOptions(2 * on.size, precision="bf16-mixed")
    result = search(chain, on, options, explain=False)
    return result, result.seconds + result.provider_seconds


def made_up_row(cluster: str, layers: int, widths: tuple[int, ...]) -> tuple[str, bool, float]:
    result, seconds = made_up(cluster, layers, widths)
    plan = str(result.choice.mesh) if result.choice else "none"
    gap = "-" if result.gap is None else f"{result.gap:.2%}"
    solved = result.configurations.get("solved", 0)
    considered = result.configurations["considered"]
    text = (
        f"| {layers:,} of {len(widths)} kinds | {cluster} | {considered:,} | {solved:,} | "
        f"{seconds:.2f} s | {result.status}, gap {gap} | {plan} |"
    )
    return text, result.status == "optimal", seconds


def growth() -> Iterator[tuple[str, int, tuple[int, ...]]]:
    """Cluster, layers, kinds: one of them grows at a time."""
    for layers in (20, 80, 320):
        yield "h100:32x8", layers, (4096,)
    for nodes in (8, 64, 512, 2048):
        yield f"h100:{nodes}x8", 80, (8192,)
    for kinds in (1, 3, 6):
        yield "h100:32x8", 120, WIDTHS[:kinds]
    yield "h100:32x8", 1000, WIDTHS


def target_row(target: Target, found: Measured) -> tuple[str, bool]:
    spent = found.answer["search"]["seconds"]
    before = spent["capture"] + spent["analyse"]
    limit = target.before_seconds
    good = (
        found.answer["status"] == "optimal"
        and spent["search"] <= target.search_seconds
        and (limit is None or before <= limit)
        and found.peak_bytes <= target.case.target_bytes
    )
    case = target.case
    cells = [
        f"{case.model}, {case.cluster}, batch {case.global_batch:,}",
        f"{spent['search']:.1f} s of {target.search_seconds:.0f}",
        f"{before:.1f} s" + (f" of {limit:.0f}" if limit is not None else ""),
        f"{found.peak_bytes / GIB:.2f} GiB",
        f"{found.answer['search']['gap']:.2%}",
        "yes" if good else "**no**",
    ]
    return "| " + " | ".join(cells) + " |", good


def formulation_lines(found: list[Timed]) -> list[str]:
    return [
        "| problem | formulation | seconds | answer | against the best |",
        "| --- | --- | --- | --- | --- |",
        *(t.row(found) for t in found),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one model")
    parser.add_argument("--limit", type=float, default=60, help="seconds for one formulation")
    arguments = parser.parse_args()
    good = True
    rows, grown = [], []
    for target in TARGETS:
        text, met = target_row(target, measure(target.case, arguments.timeout))
        print(text, flush=True)
        rows.append(text)
        good &= met
    for problem in growth():
        text, proven, seconds = made_up_row(*problem)
        print(text, flush=True)
        grown.append(text)
        good &= proven and seconds <= LONG_SECONDS
    compared = [*placement_formulations(arguments.limit), *stage_formulations(arguments.limit)]
    made = formulation_lines(compared)
    print("\n".join(made))
    head = [
        "Made by `benchmarks/search.py`. The search alone is what planning takes without capture,",
        "analyses and block prices, which are `before`.",
        "",
        machine(),
        "",
        "| model, cluster | search | before | peak memory | gap | on target |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        "How it grows, on chains of made-up blocks (recipes, other plans and neighbours included):",
        "",
        "| blocks | cluster | configurations | solved | seconds | proof | plan |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *grown,
        "",
        f"Formulations of the two inner problems, each with {arguments.limit:.0f} s:",
        "",
        *made,
    ]
    write_section("Search", head)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
