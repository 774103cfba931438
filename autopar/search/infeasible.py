"""When nothing fits: the smallest memory that would do, and what to relax, verified by solving.

`smallest_memory` minimises the fullest rank's bytes over the whole space that the pins leave. For
one configuration that is exact: the least a stage can take is found over all sets of recomputed
blocks (the best set recomputes everything that frees memory and rebuilds no more than some size),
and cuts minimise the largest of these by dynamic programming. Configurations whose bound is above
the best are skipped.

`relaxations` follows the order in which a practitioner tries: precision, recomputation,
micro-batch, schedule, ZeRO, degrees, optimizer, more ranks; then all of them at once if no single
one is enough.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from autopar.block_cost import CostProvider
from autopar.cluster import Cluster
from autopar.cost.setting import Setting
from autopar.errors import AutoparError, InfeasibleError
from autopar.search import columns, stages
from autopar.search.best_first import Prices
from autopar.search.bounds import bound
from autopar.search.columns import Columns, Floats, Ints, interval_max, interval_sum
from autopar.search.enumerate import legal_settings, search
from autopar.search.options import Pins, SearchOptions, stage_starts
from autopar.search.partition import smallest_maximum
from autopar.search.result import Choice, Infeasible, Relaxation, SearchResult
from autopar.search.stages import legal_intervals
from autopar.units import format_bytes

# Prices for another precision or cluster; None where they can't be made.
ProviderFactory = Callable[[str, Cluster], CostProvider | None]
# Beyond this many distinct block sizes not every threshold of `least_bytes` is tried.
THRESHOLDS = 64


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
    smallest = smallest_memory(Prices(provider, options.pins.boundary), found, options)
    if smallest is None:
        return result
    helps = relaxations(provider, cluster, options, factory)
    infeasible = Infeasible(result.memory_limit, max(smallest.peaks), smallest, helps)
    seconds = result.seconds + time.perf_counter() - begin
    return replace(result, infeasible=infeasible, seconds=seconds)


def infeasible_error(result: SearchResult) -> InfeasibleError:
    """The error that says by how much nothing fits, and the first thing that helps."""
    found = result.infeasible
    if found is None:
        return InfeasibleError(
            f"no plan fits in {format_bytes(result.memory_limit)} per rank",
            next_step="raise the memory limit or free the pins",
        )
    helps = [r.change for r in found.relaxations if r.fits]
    size = found.smallest_bytes
    step = f"raise the memory limit to {format_bytes(size)} ({size} bytes)"
    return InfeasibleError(explain(found), next_step=" or: ".join([step, *helps[:2]]))


def smallest_memory(
    prices: Prices, settings: Sequence[Setting], options: SearchOptions
) -> Choice | None:
    """The plan whose fullest rank takes the fewest bytes; None when no cut is legal at all."""
    starts = stage_starts(options.pins, prices.provider.block_names)
    recompute = options.pins.recompute or "auto"
    queue = [(bound(prices.optimistic(s), s).peak, s.zero, i, -1) for i, s in enumerate(settings)]
    heapq.heapify(queue)
    best = None
    where: tuple[int, int] | None = None
    while queue:
        least, zero, index, alternative = heapq.heappop(queue)
        if best is not None and least >= best:
            break
        setting = settings[index]
        if alternative < 0:
            for number in prices.alternatives(setting):
                floor = max(least, bound(prices.chain(setting, number)[1], setting).peak)
                heapq.heappush(queue, (floor, zero, index, number))
            continue
        _, chain = prices.chain(setting, alternative)
        peak = least_peak(columns.build(chain, setting), recompute, starts)
        if peak is not None and (best is None or peak < best):
            best, where = peak, (index, alternative)
    if best is None or where is None:
        return None
    setting = settings[where[0]]
    cost, chain = prices.chain(setting, where[1])
    found = stages.solve(columns.build(chain, setting), best, recompute=recompute, starts=starts)
    if found is None:
        return None
    return Choice.of(setting, cost, found)


def least_peak(
    table: Columns, recompute: str = "auto", starts: Sequence[int] | None = None
) -> int | None:
    """The smallest possible bytes of the fullest stage of one configuration."""
    side = table.blocks - table.stages + 1
    if side < 1:
        return None
    legal = legal_intervals(table, np.inf, starts)
    least = [least_bytes(table, k, recompute).astype(np.float64) for k in table.in_flight]
    cost: Floats = np.stack(
        [
            np.where(legal, bytes_, np.inf)[i : i + side, i + 1 : i + 1 + side]
            for i, bytes_ in enumerate(least)
        ]
    )
    peak = smallest_maximum(cost)
    return int(peak) if np.isfinite(peak) else None


def least_bytes(table: Columns, in_flight: int, recompute: str = "auto") -> Ints:
    """The fewest bytes of every interval over all sets of recomputed blocks."""
    base = table.fixed + in_flight * table.flight
    everything = base - in_flight * interval_sum(table.gain) + interval_max(table.saved)
    if recompute == "full":
        return np.asarray(np.maximum(everything, table.scratch))
    best = base
    if recompute == "auto":
        useful = table.gain > 0
        sizes = np.unique(table.saved[useful])
        if len(sizes) > THRESHOLDS:
            sizes = sizes[np.linspace(0, len(sizes) - 1, THRESHOLDS).astype(np.int64)]
        for size in sizes:
            chosen = useful & (table.saved <= size)
            freed = interval_sum(np.where(chosen, table.gain, 0))
            rebuilt = interval_max(np.where(chosen, table.saved, 0))
            best = np.minimum(best, base - in_flight * freed + rebuilt)
    return np.asarray(np.maximum(best, table.scratch))


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
    if factory is not None:
        together = replace(options, precision=_leaner(options.precision), pins=Pins())
        for factor in (2, 4):
            on = larger(cluster, factor)
            tried.append(attempt(f"{factor} x the ranks ({on.size})", options, on))
        if not any(t.fits for t in tried):
            tried.append(attempt("all of these pins and precision at once", together, cluster))
            for factor in (2, 4, 8, 16):
                on = larger(cluster, factor)
                tried.append(attempt(f"all at once on {on.size} ranks", together, on))
                if tried[-1].fits:
                    break
    return tuple(tried)


def _changes(options: SearchOptions, *, other_prices: bool) -> list[tuple[str, SearchOptions]]:
    """Single changes of the request on the same cluster, in the order to try them."""
    pins, changes = options.pins, []
    leaner = _leaner(options.precision)
    if leaner != options.precision and other_prices:
        changes.append((f"precision {leaner}", replace(options, precision=leaner)))

    def free(*names: str) -> None:
        pinned = [n for n in names if getattr(pins, n) is not None]
        if pinned:
            text = ", ".join(f"{n}={getattr(pins, n)}" for n in pinned)
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
    free("schedule")
    free("zero")
    free("boundary")
    free("cuts")
    free("tp", "pp", "dp", "cuts")
    if options.optimizer == "adamw":
        for name in ("sgd-momentum", "sgd"):
            changes.append((f"optimizer {name}", replace(options, optimizer=name)))
    return changes


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
