"""When nothing fits: the smallest memory that would do, and what to relax, verified by solving.

What to relax: `autopar.search.remedies`.
"""

from __future__ import annotations

import time
from dataclasses import replace

from autopar.block_cost import CostProvider
from autopar.cluster import Cluster
from autopar.errors import InfeasibleError
from autopar.search.enumerate import legal_settings
from autopar.search.illegal_cuts import why_no_cut
from autopar.search.options import SearchOptions
from autopar.search.prices import Prices
from autopar.search.recompute_pin import named_blocks
from autopar.search.remedies import ProviderFactory, relaxations
from autopar.search.result import Infeasible, SearchResult
from autopar.search.smallest_memory import smallest_memory
from autopar.units import format_bytes


def explain_infeasible(
    result: SearchResult,
    provider: CostProvider,
    cluster: Cluster,
    options: SearchOptions,
    factory: ProviderFactory | None = None,
) -> SearchResult:
    """The same result with `infeasible` filled in; a result that has a plan comes back as it is.

    Without a `factory` only relaxations that keep precision and cluster are tried.
    """
    if result.choice is not None:
        return result
    begin = time.perf_counter()
    found = legal_settings(provider, cluster, options)[0]
    known = Prices(provider, named_blocks(options.pins))
    smallest = smallest_memory(known, found, options)
    if smallest is None:
        blocks = known.optimistic(found[0]).blocks
        return replace(result, no_cut=why_no_cut(blocks, found, options))
    helps = relaxations(provider, cluster, options, factory)
    infeasible = Infeasible(result.memory_limit, max(smallest.peaks), smallest, helps)
    seconds = result.seconds + time.perf_counter() - begin
    return replace(result, infeasible=infeasible, seconds=seconds)


def infeasible_error(result: SearchResult) -> InfeasibleError:
    """The error that says by how much nothing fits, and the first thing that helps."""
    found = result.infeasible
    reason, step = result.no_cut
    if reason:
        return InfeasibleError(f"no plan is legal, whatever the memory: {reason}", next_step=step)
    if found is None:
        return InfeasibleError(
            f"no plan fits in {format_bytes(result.memory_limit)} per rank",
            next_step="raise the memory limit or free the pins",
        )
    helps = [r.change for r in found.relaxations if r.fits]
    size = found.smallest_bytes
    step = f"raise the memory limit to {format_bytes(size)} ({size} bytes)"
    return InfeasibleError(explain(found), next_step=" or: ".join([step, *helps[:2]]))


def explain(found: Infeasible) -> str:
    """The report for a reader: by how much it does not fit, and what would."""
    lines = [
        f"nothing fits in {format_bytes(found.limit)} per rank; the least that any plan of this"
        f" space needs is {format_bytes(found.smallest_bytes)} ({found.smallest.describe()})"
    ]
    for change in found.relaxations:
        if change.fits and change.step_seconds is not None and change.peak_bytes is not None:
            lines.append(
                f"  fits with {change.change}: {change.step_seconds:.4g} s per step,"
                f" {format_bytes(change.peak_bytes)} ({change.plan})"
            )
        elif change.untried:
            lines.append(f"  not tried: {change.change}: {change.untried}")
        else:
            lines.append(f"  not enough: {change.change}")
    return "\n".join(lines)
