"""The least memory that any plan can do with.

`smallest_memory` minimises the fullest rank's bytes over given configurations. For one of them that
is exact: the least a stage can take is found over all sets of recomputed blocks (the best set
recomputes everything that frees memory and rebuilds no more than some size), and cuts minimise the
largest of these by dynamic programming; for an interleaved or zero-bubble one it is exact over
the families of `interleaved`. Configurations whose bound is above the best are skipped.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from itertools import product

import numpy as np

from autopar.block_cost import FULL
from autopar.cost.setting import Setting
from autopar.search import columns, gathered, interleaved, zero_bubble
from autopar.search.band import Band
from autopar.search.best_first import solve_stages
from autopar.search.bounds import bound
from autopar.search.chain import Chain, Floats, Ints, interval_sum
from autopar.search.columns import Columns
from autopar.search.options import SearchOptions, stage_starts
from autopar.search.partition import Table, smallest_maximum
from autopar.search.prices import Prices
from autopar.search.recompute_pin import recompute_mode
from autopar.search.reshard_pin import kept_gathered
from autopar.search.result import Choice
from autopar.search.stages import legal_intervals

# Beyond this many distinct kinds of blocks not every threshold of `least_bytes` is tried.
THRESHOLDS = 16


def smallest_memory(
    prices: Prices, settings: Sequence[Setting], options: SearchOptions
) -> Choice | None:
    """The plan whose fullest rank takes the fewest bytes; None when no cut is legal at all."""
    starts = stage_starts(options.pins, prices.provider.block_names)
    recompute = recompute_mode(options.pins)
    # What is free to be kept gathered is not.
    kept = kept_gathered(options.pins, prices.provider.block_names) or frozenset()
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
        if setting.divided:
            peak = zero_bubble.least_peak(chain, setting, recompute, starts)
        elif setting.in_turns:
            peak = interleaved.least_peak(chain, setting, recompute, starts)
        else:
            peak = _least_peak(chain, setting, recompute, starts, kept)
        if peak is not None and (best is None or peak < best):
            best, where = peak, (index, alternative)
    if best is None or where is None:
        return None
    setting = settings[where[0]]
    cost, chain = prices.chain(setting, where[1])
    found = solve_stages(chain, setting, best, recompute, starts, kept=kept)
    if found is None:
        return None
    return Choice.of(setting, cost, found)


def _least_peak(
    chain: Chain,
    setting: Setting,
    recompute: str,
    starts: Sequence[int] | None,
    kept: Collection[str],
) -> int | None:
    """`least_peak` with some blocks `kept` gathered."""
    plain = least_peak(columns.build(chain, setting), recompute, starts)
    if not kept or plain is None or not setting.may_keep:
        return plain
    most = least_peak(columns.build(chain, setting.keeping), recompute, starts)
    if most is None or len(kept) == len(chain):
        return most
    return gathered.least_peak(chain, setting, recompute, starts, kept, most)


def least_peak(
    table: Columns, recompute: str = "auto", starts: Sequence[int] | None = None
) -> int | None:
    """The smallest possible bytes of the fullest stage of one configuration."""
    side = table.blocks - table.stages + 1
    if side < 1:
        return None
    legal = legal_intervals(table, np.inf, starts)
    least = [least_bytes(table, i, recompute).astype(np.float64) for i in range(table.stages)]
    band = Band(table.blocks, side)
    some = band.some & band(legal)
    first = np.arange(side)[:, None] >= np.arange(side)[None, :]
    cost: Floats = np.stack(
        [
            np.where(first & some[i : i + side], band(bytes_)[i : i + side], np.inf)
            for i, bytes_ in enumerate(least)
        ]
    )
    ends = Table(cost, cost, tuple(range(table.stages)), table.blocks, table.microbatches)
    peak = smallest_maximum(ends, cost)
    return int(peak) if np.isfinite(peak) else None


def least_bytes(table: Columns, stage: int, recompute: str = "auto") -> Ints:
    """The fewest bytes of every interval as a stage over all sets of recomputed blocks."""
    memory = table.memory
    shape = (len(memory.kinds), *memory.flight.shape)
    none = np.zeros(shape, bool)
    counts = [interval_sum((table.which == sort).astype(np.int64)) for sort in table.sorts]
    best = memory.peaks(stage, np.zeros_like(memory.flight), none)
    ways = [w for w in table.ways if recompute != "selective" or w.label != FULL]
    if recompute == "full":
        gain, kinds = np.zeros_like(memory.flight), none
        for way in (w for w in ways if w.label == FULL):
            gain = gain + way.gain * counts[way.sort]
            kinds[way.kind] |= counts[way.sort] > 0
        return memory.peaks(stage, gain, kinds)
    if recompute == "none":
        return best
    # Everything that frees memory and rebuilds no more than some kind does, in each phase.
    limits = [memory.moments(phase).again for phase in memory.phases[stage]]
    tried = np.linspace(0, len(memory.kinds) - 1, min(len(memory.kinds), THRESHOLDS))
    for most in product(tried.astype(np.int64), repeat=len(limits)):
        can = np.logical_and.reduce(
            [again <= again[k] for again, k in zip(limits, most, strict=True)]
        )
        gain, kinds = np.zeros_like(memory.flight), np.zeros(shape, bool)
        for sort in table.sorts:
            own = np.zeros_like(memory.flight)
            taken = np.full(memory.flight.shape, -1, np.int64)
            for way in (w for w in ways if w.sort == sort):
                better = can[way.kind] & (way.gain > own)
                own, taken = np.where(better, way.gain, own), np.where(better, way.kind, taken)
            held = counts[sort] > 0
            gain = gain + np.where(held, own * counts[sort], 0)
            for kind in {w.kind for w in ways if w.sort == sort}:
                kinds[kind] |= held & (taken == kind)
        best = np.minimum(best, memory.peaks(stage, gain, kinds))
    return best
