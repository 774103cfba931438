"""Which blocks of a stage to recompute: the cheapest set that frees enough memory, exactly.

Choose R to minimise the sum of `extra` with  k * sum of gain(R) - max of saved(R) >= need:
recomputing a block frees `gain` bytes per micro-batch in flight (k of them), and rebuilding one
needs the largest `saved` among R. Blocks with equal numbers are one item with a count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
# Above this many combinations of counts the columns are solved one by one.
ENUMERATION_LIMIT = 1024


@dataclass(frozen=True)
class Items:
    """Distinct blocks worth recomputing: per item its seconds, bytes freed, bytes rebuilt."""

    extra: Floats
    gain: Ints
    saved: Ints

    def __len__(self) -> int:
        return len(self.extra)


def distinct_items(extra: Floats, gain: Ints, saved: Ints) -> tuple[Items, Ints]:
    """The distinct items, cheapest per byte first, and which item each block is (-1: none)."""
    rows = [(e / g if g > 0 else 0.0, e, g, s) for e, g, s in zip(extra, gain, saved, strict=True)]
    known = sorted({row for row in rows if row[2] > 0})
    index = {row: i for i, row in enumerate(known)}
    which = np.array([index.get(row, -1) for row in rows], np.int64)
    items = Items(
        np.array([r[1] for r in known], np.float64),
        np.array([r[2] for r in known], np.int64),
        np.array([r[3] for r in known], np.int64),
    )
    return items, which


def cheapest_many(items: Items, counts: Ints, need: Ints, k: Ints) -> Floats | None:
    """Smallest seconds per column (`inf`: impossible); None when there are too many combinations.

    `counts[c, d]`: how many blocks of item d column c has; `need[c]` > 0 bytes; `k[c]` in flight.
    All but the most frequent item are enumerated; its count then follows.
    """
    most = counts.max(axis=0)
    main = int(counts.sum(axis=0).argmax())
    others = [d for d in range(len(items)) if d != main and most[d] > 0]
    combinations = 1
    for d in others:
        combinations *= int(most[d]) + 1
        if combinations > ENUMERATION_LIMIT:
            return None
    best = np.full(len(counts), np.inf)
    frees = k * items.gain[main]
    for chosen in product(*(range(int(most[d]) + 1) for d in others)):
        taken = [(d, c) for d, c in zip(others, chosen, strict=True) if c]
        gain = sum(c * int(items.gain[d]) for d, c in taken)
        seconds = sum(c * float(items.extra[d]) for d, c in taken)
        rebuilt = max((int(items.saved[d]) for d, _ in taken), default=0)
        left = need + rebuilt - k * gain
        left_with_main = need + max(rebuilt, int(items.saved[main])) - k * gain
        count = np.where(left <= 0, 0, np.maximum(1, -(-left_with_main // frees)))
        legal = count <= counts[:, main]
        for d, c in taken:
            legal &= counts[:, d] >= c
        cost = np.where(legal, seconds + count * items.extra[main], np.inf)
        best = np.minimum(best, cost)
    return best


def cheapest(items: Items, counts: Sequence[int], need: int, k: int) -> tuple[float, list[int]]:
    """Smallest seconds and the count chosen of each item; (`inf`, []) when impossible."""
    if need <= 0:
        return 0.0, [0] * len(items)
    best, choice = np.inf, []
    held = [d for d in range(len(items)) if counts[d] > 0]
    for rebuilt in sorted({int(items.saved[d]) for d in held}, reverse=True):
        allowed = [d for d in held if items.saved[d] <= rebuilt]
        found = _cover(items, [(d, int(counts[d])) for d in allowed], need + rebuilt, k, best)
        if found is not None:
            best, chosen = found
            choice = [chosen.get(d, 0) for d in range(len(items))]
    return float(best), choice


def _cover(
    items: Items, allowed: list[tuple[int, int]], need: int, k: int, cutoff: float
) -> tuple[float, dict[int, int]] | None:
    """Covering knapsack over (item, count), best ratio first: dominance and LP bound."""
    single = [d for d, count in allowed for _ in range(count)]
    gains = np.array([k * int(items.gain[d]) for d in single], np.int64)
    costs = np.array([items.extra[d] for d in single], np.float64)
    gain_before = np.concatenate([[0], np.cumsum(gains)])
    cost_before = np.concatenate([[0.0], np.cumsum(costs)])
    if gain_before[-1] < need:
        return None
    labels_gain, labels_cost = np.zeros(1, np.int64), np.zeros(1)
    history: list[tuple[NDArray[np.int64], NDArray[np.bool_]]] = []
    best, winner = cutoff, None
    for step in range(len(single)):
        both_gain = np.concatenate([labels_gain, labels_gain + gains[step]])
        both_cost = np.concatenate([labels_cost, labels_cost + costs[step]])
        parent = np.concatenate([np.arange(len(labels_gain))] * 2)
        took = np.arange(len(both_gain)) >= len(labels_gain)
        keep, done = _undominated(both_gain, both_cost, need)
        if done is not None and both_cost[done] < best:
            best, winner = float(both_cost[done]), (step, int(parent[done]), bool(took[done]))
        left = need - both_gain[keep]
        # The rest at best: items step + 1 .. in order of ratio, the last one in part.
        reach = np.interp(left + gain_before[step + 1], gain_before, cost_before)
        rest = np.where(
            left + gain_before[step + 1] > gain_before[-1], np.inf, reach - cost_before[step + 1]
        )
        keep = keep[both_cost[keep] + rest < best * (1 - 1e-15)]
        history.append((parent[keep], took[keep]))
        labels_gain, labels_cost = both_gain[keep], both_cost[keep]
        if not len(keep):
            break
    if winner is None:
        return None
    return best, _chosen(single, history, winner)


def _undominated(gain: Ints, cost: Floats, need: int) -> tuple[Ints, int | None]:
    """Labels that still need more and are not dominated, and the cheapest that needs no more."""
    enough = np.flatnonzero(gain >= need)
    done = int(enough[cost[enough].argmin()]) if len(enough) else None
    order = np.lexsort((cost, -gain))
    order = order[gain[order] < need]
    if not len(order):
        return order, done
    cheapest_so_far = np.minimum.accumulate(cost[order])
    keep = np.ones(len(order), bool)
    keep[1:] = cost[order][1:] < cheapest_so_far[:-1]
    return order[keep], done


def _chosen(
    single: list[int],
    history: list[tuple[NDArray[np.int64], NDArray[np.bool_]]],
    winner: tuple[int, int, bool],
) -> dict[int, int]:
    """Walk the parents of the winning label back to the start."""
    step, label, took = winner
    counts: dict[int, int] = {}
    while True:
        if took:
            counts[single[step]] = counts.get(single[step], 0) + 1
        step -= 1
        if step < 0:
            return counts
        label, took = int(history[step][0][label]), bool(history[step][1][label])
