"""The best ways to run an interval of blocks as one stage, some of its blocks kept gathered.

A step takes  sum T + (m - 1) max T + max E,  so a way with T seconds of a micro-batch and E at the
end is not needed beside one with T' <= T and T' + E' <= T + E: what the latter may add to the
longest end, it takes from the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.block_cost import FULL
from autopar.search import knapsack
from autopar.search.chain import Floats, Ints
from autopar.search.gathered.moments import Masks, Needs, StageMoments
from autopar.search.gathered.prices import Prices
from autopar.search.moment_tables import NEVER


@dataclass(frozen=True)
class Point:
    """One way: `seconds` of a micro-batch, `end` of a step; `kept`: which of the blocks are kept;
    `taken`: how many blocks take each item of the knapsack (empty: all or none is recomputed)."""

    seconds: float
    end: float
    kept: tuple[bool, ...]
    taken: tuple[int, ...]


def points(
    prices: Prices, stage: int, start: int, stop: int, limit: int, cap: float
) -> list[Point]:
    """The ways that fit in `limit` bytes, take no more than `cap` seconds and are needed, fastest
    first."""
    kept = prices.sets(start, stop)
    seconds, end = _times(prices, start, stop, kept)
    moments = StageMoments(prices.moments, stage, start, stop, kept)
    needs = moments.needs(limit)
    counts = _counts(prices, start, stop, kept)
    if prices.recompute == FULL:
        least = seconds + _whole(prices, counts, moments, limit)
    else:
        least = seconds + _relaxed(prices, counts, needs)
    order = np.argsort(least, kind="stable")
    later = np.minimum.accumulate((least + end)[order][::-1])[::-1]
    found: list[Point] = []
    fastest = shortest = float("inf")
    for place, index in enumerate(order):
        if least[index] > cap or (least[index] >= fastest and later[place] >= shortest):
            break
        if not np.isfinite(least[index]):
            break
        if least[index] >= fastest and least[index] + end[index] >= shortest:
            continue
        taken: Sequence[int] = ()
        mine = float(least[index])
        if prices.recompute != FULL and needs.least[index] > 0:
            asked = needs.each[prices.items.kind, index].tolist()
            need = int(needs.least[index])
            # It has to be faster than all before it, or to end sooner.
            enough = max(fastest, shortest - float(end[index])) - float(seconds[index])
            extra, taken = knapsack.cheapest(
                prices.items, counts[index].tolist(), need, asked, enough
            )
            mine = float(seconds[index]) + extra
        if np.isfinite(mine) and (mine < fastest or mine + end[index] < shortest):
            found.append(Point(mine, float(end[index]), tuple(kept[index].tolist()), tuple(taken)))
            fastest = min(fastest, mine)
            shortest = min(shortest, mine + float(end[index]))
    return _needed(found)


def _needed(found: list[Point]) -> list[Point]:
    """Those that no other one makes superfluous, fastest first."""
    kept: list[Point] = []
    shortest = float("inf")
    for point in sorted(found, key=lambda p: (p.seconds, p.seconds + p.end)):
        if point.seconds + point.end < shortest:
            kept.append(point)
            shortest = point.seconds + point.end
    return kept


def best_of(columns: Sequence[Sequence[Point]], microbatches: int) -> tuple[float, list[Point]]:
    """One point of every stage, such that the step is the shortest; its seconds."""
    best: tuple[float, list[Point]] = (float("inf"), [])
    for longest in sorted({p.end for points in columns for p in points}):
        chosen = [next((p for p in points if p.end <= longest), None) for points in columns]
        some = [p for p in chosen if p is not None]
        if len(some) < len(columns):
            continue
        seconds = [p.seconds for p in some]
        total = sum(seconds) + (microbatches - 1) * max(seconds) + max(p.end for p in some)
        if total < best[0]:
            best = total, some
    return best


def _times(prices: Prices, start: int, stop: int, kept: Masks) -> tuple[Floats, Floats]:
    """By set: seconds of a micro-batch without recomputation, and of the end of the step."""
    saves, ends = prices.saves[start:stop].copy(), prices.ends[start:stop].copy()
    saves[0] += prices.first_saves[start]
    ends[0] += prices.first_ends[start]
    seconds = prices.resharded.seconds[start, stop] - kept @ saves
    return seconds, prices.resharded.end[start, stop] + kept @ ends


def _counts(prices: Prices, start: int, stop: int, kept: Masks) -> Ints:
    """[set, sort of the items]: how many blocks there are of each, resharded and then kept."""
    one_hot = prices.chain.which[start:stop, None] == np.arange(prices.sorts)[None, :]
    whole = one_hot.sum(axis=0)
    mine = kept.astype(np.int64) @ one_hot.astype(np.int64)
    return np.concatenate([whole[None, :] - mine, mine], axis=1)


def _whole(prices: Prices, counts: Ints, moments: StageMoments, limit: int) -> Floats:
    """By set: seconds that recomputing everything adds; `inf` where it does not fit."""
    held = counts[:, [w.sort for w in prices.whole]]
    freed = held @ np.array([w.gain for w in prices.whole], np.int64)
    kinds = {w.kind for w, some in zip(prices.whole, held.T, strict=True) if some.any()}
    extra = held @ np.array([w.extra for w in prices.whole])
    return np.asarray(np.where(moments.peaks(freed, kinds) <= limit, extra, np.inf))


def _relaxed(prices: Prices, counts: Ints, needs: Needs) -> Floats:
    """By set: seconds that recomputation adds at least, by the linear relaxation of the knapsack;
    `inf` where even all is too little."""
    items = prices.items
    extra = np.zeros(len(counts))
    open_sets = needs.least > 0
    if not open_sets.any():
        return extra
    if not len(items):
        return np.where(open_sets, np.inf, 0.0)
    held = counts[:, items.sort] > 0
    asked = np.where(held, needs.each[items.kind].T, NEVER).min(axis=1)
    left = np.where(open_sets, np.maximum(needs.least, asked), 0).astype(np.float64)
    for step in knapsack.increments(items, range(len(items))):
        frees = np.minimum(left, step.gain * counts[:, step.sort])
        extra += frees / step.gain * step.extra
        left = left - frees
    return np.asarray(np.where(left > 0, np.inf, extra))
