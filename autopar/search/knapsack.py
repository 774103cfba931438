"""Which blocks of a stage to recompute, and how: the cheapest choice that frees enough, exactly.

A block of a sort can be recomputed in one of several ways (a set of its ops, or the whole), or not
at all. Choose for every block at most one way to minimise the sum of `extra` with  sum of gain >=
need  and  sum of gain >= threshold of every way chosen: a way frees `gain` bytes, and what it
rebuilds fits only when enough is free (`autopar.search.moment_tables`). Where `need` is not above
0, nothing is recomputed. Blocks of one sort are alike, so counts are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search.columns import Way

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Items:
    """Ways worth taking: per item its sort of block, seconds, bytes freed, and its kind, which
    tells its threshold. Items of a sort stand together, fewest bytes first,
    then longest."""

    sort: Ints
    extra: Floats
    gain: Ints
    kind: Ints
    labels: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.extra)


def items_of(ways: Iterable[Way], thresholds: Callable[[Way], Ints]) -> Items:
    """The ways that free memory, without those that another one of their sort is no worse than: in
    seconds, bytes freed, and `thresholds` of all stages."""
    found: list[Way] = []
    for way in sorted(ways, key=lambda w: (w.sort, w.extra, -w.gain)):
        better = any(
            w.sort == way.sort
            and w.gain >= way.gain
            and bool((thresholds(w) <= thresholds(way)).all())
            for w in found
        )
        if way.gain > 0 and not better:
            found.append(way)
    found.sort(key=lambda w: (w.sort, w.gain, -w.extra))
    return Items(
        np.array([w.sort for w in found], np.int64),
        np.array([w.extra for w in found], np.float64),
        np.array([w.gain for w in found], np.int64),
        np.array([w.kind for w in found], np.int64),
        tuple(w.label for w in found),
    )


@dataclass(frozen=True)
class Increment:
    """From one corner of a sort's hull of (bytes freed, seconds) to the next: from item `before`
    (-1: not recomputed) to `item`."""

    sort: int
    before: int
    item: int
    gain: int
    extra: float
    ratio: float


def increments(items: Items, allowed: Sequence[int]) -> list[Increment]:
    """Those of all sorts, cheapest per byte first: a linear relaxation takes them in this order."""
    found: list[Increment] = []
    for sort in dict.fromkeys(int(items.sort[d]) for d in allowed):
        corners: list[tuple[int, int, float]] = [(-1, 0, 0.0)]
        for d in allowed:
            if items.sort[d] != sort:
                continue
            point = (d, int(items.gain[d]), float(items.extra[d]))
            while len(corners) > 1 and _above(corners[-2], corners[-1], point):
                corners.pop()
            corners.append(point)
        ratio = -np.inf
        for (d, gain, extra), (e, more, longer) in zip(corners, corners[1:], strict=False):
            # Rounding must not change the order along a hull.
            ratio = max(ratio, (longer - extra) / (more - gain))
            found.append(Increment(sort, d, e, more - gain, longer - extra, ratio))
    return sorted(found, key=lambda i: i.ratio)


def _above(
    first: tuple[int, int, float], middle: tuple[int, int, float], last: tuple[int, int, float]
) -> bool:
    """The middle point lies on or above the line through the others, or frees no less than the
    last."""
    (_, a, s), (_, b, t), (_, c, u) = first, middle, last
    return b >= c or (t - s) * (c - a) >= (u - s) * (b - a)


def cheapest(
    items: Items,
    counts: Sequence[int],
    need: int,
    thresholds: Sequence[int],
    cutoff: float = float("inf"),
) -> tuple[float, list[int]]:
    """Smallest seconds and how many blocks take each item; (`inf`, []) when there are none below
    `cutoff`.

    `counts[s]`: how many blocks of sort s there are; `thresholds[d]` of item d.
    """
    if need <= 0:
        return 0.0, [0] * len(items)
    best, choice = cutoff, []
    held = [d for d in range(len(items)) if counts[items.sort[d]] > 0]
    for most in sorted({thresholds[d] for d in held}, reverse=True):
        allowed = [d for d in held if thresholds[d] <= most]
        found = _cover(items, counts, allowed, max(need, most), best)
        if found is not None:
            best, chosen = found
            choice = [chosen.get(d, 0) for d in range(len(items))]
    return (float(best), choice) if choice else (float("inf"), [])


def _cover(
    items: Items, counts: Sequence[int], allowed: Sequence[int], need: int, cutoff: float
) -> tuple[float, dict[int, int]] | None:
    """Covering knapsack, block by block: labels (bytes, seconds), dominance and LP bound."""
    steps = increments(items, allowed)
    left = {i.sort: int(counts[i.sort]) for i in steps}
    if sum(i.gain * left[i.sort] for i in steps) < need:
        return None
    best, winner = cutoff, None
    greedy = _greedy(steps, left, need)
    if greedy[0] < best:
        best, winner = greedy
    labels_gain, labels_cost = np.zeros(1, np.int64), np.zeros(1)
    history: list[tuple[Ints, Ints]] = []
    last: tuple[int, int, int] | None = None
    for sort in list(left):
        ways = [d for d in allowed if items.sort[d] == sort]
        gains, costs = np.array([0, *items.gain[ways]]), np.array([0.0, *items.extra[ways]])
        chosen = np.array([-1, *ways])
        for _ in range(left[sort]):
            left[sort] -= 1
            parent = np.repeat(np.arange(len(labels_gain)), len(gains))
            took = np.tile(chosen, len(labels_gain))
            gain = (labels_gain[:, None] + gains).ravel()
            cost = (labels_cost[:, None] + costs).ravel()
            keep, done = _undominated(gain, cost, need)
            if done is not None and cost[done] < best:
                best, last = float(cost[done]), (len(history), int(parent[done]), int(took[done]))
            keep = keep[cost[keep] + _rest(steps, left, need - gain[keep]) < best * (1 - 1e-15)]
            history.append((parent[keep], took[keep]))
            labels_gain, labels_cost = gain[keep], cost[keep]
            if not len(keep):
                return (best, _chosen(history, last)) if last else _given(best, winner)
    return (best, _chosen(history, last)) if last else _given(best, winner)


def _given(best: float, winner: dict[int, int] | None) -> tuple[float, dict[int, int]] | None:
    return (best, winner) if winner is not None else None


def _greedy(
    steps: Sequence[Increment], left: dict[int, int], need: int
) -> tuple[float, dict[int, int]]:
    """Increments in their order until enough is free: a legal choice, near the best."""
    cost = 0.0
    chosen: dict[int, int] = {}
    for step in steps:
        taken = min(left[step.sort], -(-need // step.gain)) if need > 0 else 0
        if taken:
            cost += taken * step.extra
            need -= taken * step.gain
            chosen[step.item] = chosen.get(step.item, 0) + taken
            if step.before >= 0:
                chosen[step.before] -= taken
    return cost, {d: n for d, n in chosen.items() if n}


def _rest(steps: Sequence[Increment], left: dict[int, int], need: Ints) -> Floats:
    """The seconds that freeing `need` takes at best of the blocks that are left, the last in
    part."""
    count = np.array([left[s.sort] for s in steps])
    gain = np.concatenate([[0], np.cumsum(count * np.array([s.gain for s in steps]))])
    cost = np.concatenate([[0.0], np.cumsum(count * np.array([s.extra for s in steps]))])
    reach = np.interp(need, gain, cost)
    return np.asarray(np.where(need > gain[-1], np.inf, reach))


def _undominated(gain: Ints, cost: Floats, need: int) -> tuple[Ints, int | None]:
    """Labels that still need more and are not dominated, and the cheapest that needs no more."""
    enough = np.flatnonzero(gain >= need)
    done = int(enough[cost[enough].argmin()]) if len(enough) else None
    order = np.lexsort((cost, -gain))
    order = order[gain[order] < need]
    return undominated(cost, order), done


def undominated(cost: Floats, order: Ints) -> Ints:
    """Of labels in an order of falling gain those that are cheaper than all before them."""
    if not len(order):
        return order
    cheapest_so_far = np.minimum.accumulate(cost[order])
    keep = np.ones(len(order), bool)
    keep[1:] = cost[order][1:] < cheapest_so_far[:-1]
    return order[keep]


def _chosen(history: list[tuple[Ints, Ints]], last: tuple[int, int, int]) -> dict[int, int]:
    """Walk the parents of the winning label back to the start."""
    step, label, took = last
    counts: dict[int, int] = {}
    while True:
        if took >= 0:
            counts[took] = counts.get(took, 0) + 1
        step -= 1
        if step < 0:
            return counts
        label, took = int(history[step][0][label]), int(history[step][1][label])
