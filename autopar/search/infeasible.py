"""When nothing fits: the smallest memory that would do, and what to relax, verified by solving.

`relaxations` follows the order in which a practitioner tries: precision, recomputation,
micro-batch, schedule, ZeRO, degrees, optimizer, more ranks, up to the first number of them that is
enough; then all of them at once if no single one is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from autopar.block_cost import CostProvider
from autopar.cluster import Cluster
from autopar.errors import AutoparError, InfeasibleError
from autopar.plan_document import OF_ELEMENTS
from autopar.search.enumerate import legal_settings, search
from autopar.search.illegal_cuts import why_no_cut
from autopar.search.options import Pins, SearchOptions
from autopar.search.prices import Prices
from autopar.search.recompute_pin import named_blocks
from autopar.search.result import Infeasible, Relaxation, SearchResult
from autopar.search.smallest_memory import smallest_memory
from autopar.units import format_bytes

# Prices for another precision or cluster; None where they can't be made.
ProviderFactory = Callable[[str, Cluster], CostProvider | None]


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


def relaxations(
    provider: CostProvider,
    cluster: Cluster,
    options: SearchOptions,
    factory: ProviderFactory | None,
) -> tuple[Relaxation, ...]:
    """Every relaxation that applies here, solved; all free decisions together if none is enough."""

    def attempt(change: str, other: SearchOptions, on: Cluster) -> Relaxation:
        same = on is cluster and other.precision == options.precision
        try:
            prices = provider if same or factory is None else factory(other.precision, on)
            result = search(prices, on, other, explain=False) if prices is not None else None
        except AutoparError:
            return Relaxation(change, False)
        if result is None or result.choice is None:
            return Relaxation(change, False)
        peak = max(result.choice.peaks)
        return Relaxation(change, True, result.step_seconds, peak, result.choice.describe())

    tried = [
        attempt(change, other, cluster)
        for change, other in _changes(options, other_prices=factory is not None)
    ]
    if factory is None:
        return tuple(tried)
    together = replace(options, precision=_leaner(options.precision), pins=options.forced)
    for factor in (2, 4):
        on = larger(cluster, factor)
        tried.append(attempt(f"{factor} x the ranks ({on.size})", options, on))
        if tried[-1].fits:
            return tuple(tried)
    if not any(t.fits for t in tried):
        tried.append(attempt("all of these pins and precision at once", together, cluster))
    for factor in (2, 4, 8, 16):
        if any(t.fits for t in tried):
            break
        on = larger(cluster, factor)
        tried.append(attempt(f"all at once on {on.size} ranks", together, on))
    return tuple(tried)


def _changes(options: SearchOptions, *, other_prices: bool) -> list[tuple[str, SearchOptions]]:
    """Single changes of the request on the same cluster, in the order to try them."""
    pins, changes = options.pins, []
    leaner = _leaner(options.precision)
    if leaner != options.precision and other_prices:
        changes.append((f"precision {leaner}", replace(options, precision=leaner)))

    def free(*names: str) -> None:
        names = tuple(n for n in names if getattr(options.forced, n) is None)
        pinned = [n for n in names if getattr(pins, n) is not None]
        if pinned:
            text = ", ".join(str(Pins(**{n: getattr(pins, n)})) for n in pinned)
            changes.append((f"free {text}", replace(options, pins=pins.without(*names))))

    if pins.recompute == "none":
        changes.append(
            (
                "recompute=full instead of none",
                replace(options, pins=replace(pins, recompute="full")),
            )
        )
    free("recompute")
    free("microbatch", "microbatches")
    free("schedule", "chunks")
    free("zero")
    free("boundary")
    free("cuts")
    free("tp", "pp", "dp", "cp", "cuts")
    for name in _LEANER_OPTIMIZERS.get(options.optimizer, ()):
        if options.spare_experts and name not in OF_ELEMENTS:
            continue  # what is in a slot could not be moved
        changes.append((f"optimizer {name}", replace(options, optimizer=name)))
    return changes


# The nearest to what is asked for first.
_LEANER_OPTIMIZERS = {
    "adamw": ("adamw-8bit", "adafactor", "sgd-momentum", "sgd"),
    "adamw-8bit": ("adafactor", "sgd"),
    "sgd-momentum": ("sgd",),
}


def _leaner(precision: str) -> str:
    return {"fp32": "bf16-mixed", "bf16-mixed": "bf16"}.get(precision, precision)


def larger(cluster: Cluster, factor: int) -> Cluster:
    """The same cluster with `factor` times the nodes; its outermost link reaches all of them."""
    nodes = cluster.nodes * factor
    last = cluster.links[-1]
    links = (*cluster.links[:-1], replace(last, ranks=last.ranks * factor))
    return replace(cluster, name=f"{cluster.name} x{factor}", nodes=nodes, links=links)


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
        else:
            lines.append(f"  not enough: {change.change}")
    return "\n".join(lines)
