"""The least memory that any plan can do with.

`smallest_memory` minimises the fullest rank's bytes over given configurations. For one of them that
is exact: the least a stage can take is found over all sets of recomputed blocks (the best set
recomputes everything that frees memory and rebuilds no more than some size), and cuts minimise the
largest of these by dynamic programming. Configurations whose bound is above the best are skipped.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from autopar.cost.setting import Setting
from autopar.search import columns, stages
from autopar.search.best_first import Prices
from autopar.search.bounds import bound
from autopar.search.columns import Columns, Floats, Ints, interval_max, interval_sum
from autopar.search.options import SearchOptions, stage_starts
from autopar.search.partition import smallest_maximum
from autopar.search.result import Choice
from autopar.search.stages import legal_intervals

# Beyond this many distinct block sizes not every threshold of `least_bytes` is tried.
THRESHOLDS = 64


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
            for number in prices.alternatives(setting, options.pins.boundary):
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
