"""`knapsack.cheapest` for many stages at once: the whole frontier of seconds over bytes, kept.

Stages with equally many blocks of every sort ask the same knapsack for different bytes. Its answers
are a staircase: the labels (bytes freed, seconds) that no other choice beats.
"""

from __future__ import annotations

import numpy as np

from autopar.search.knapsack import Floats, Ints, Items, undominated

# More items, or longer staircases, are left to one knapsack at a time.
MOST_ITEMS = 40
MOST_LABELS = 6000


class KnapsackFrontiers:
    """Staircases by the number of blocks of every sort and the items that are allowed."""

    def __init__(self, items: Items) -> None:
        self.items = items
        self.bits = 1 << np.arange(len(items), dtype=np.int64)
        self.sorts = int(items.sort.max(initial=-1)) + 1
        self.of_sort = [int(self.bits[items.sort == s].sum()) for s in range(self.sorts)]
        self._of_sort: dict[tuple[int, int], list[tuple[Ints, Floats]]] = {}
        self._known: dict[tuple[tuple[int, ...], int], tuple[Ints, Floats] | None] = {}

    def cheapest(self, counts: Ints, need: Ints, thresholds: Ints) -> Floats | None:
        """Smallest seconds per column (`inf`: impossible); None when a staircase gets too long.

        `counts[c, s]` blocks of sort s, `need[c]` > 0 bytes, `thresholds[c, d]` of item d.
        """
        if len(self.items) > MOST_ITEMS:
            return None
        held = counts[:, self.items.sort] > 0
        best = np.full(len(need), np.inf)
        asked_of = np.maximum(need[:, None], thresholds)
        for item in range(len(self.items)):
            asked = asked_of[:, item]
            mask = ((thresholds <= asked[:, None]) & held) @ self.bits
            # What is asked for with an item before this one is known.
            again = ((asked_of[:, :item] == asked[:, None]) & held[:, :item]).any(axis=1)
            where = np.flatnonzero(held[:, item] & ~again)
            if not len(where):
                continue
            keys = np.concatenate([counts[where], mask[where, None]], axis=1)
            kinds, index = np.unique(keys, axis=0, return_inverse=True)
            order = np.argsort(index.ravel(), kind="stable")
            ends = np.searchsorted(index.ravel()[order], np.arange(1, len(kinds)))
            groups = np.split(where[order], ends)
            for key, cells in zip(kinds.tolist(), groups, strict=True):
                stairs = self._stairs(tuple(key[:-1]), key[-1])
                if stairs is None:
                    return None
                gains, costs = stairs
                place = np.searchsorted(gains, asked[cells])
                found = np.where(place < len(gains), costs[place % len(costs)], np.inf)
                best[cells] = np.minimum(best[cells], found)
        return best

    def _stairs(self, counts: tuple[int, ...], mask: int) -> tuple[Ints, Floats] | None:
        """Bytes freed, rising, and the fewest seconds that free as many or more. Stages that begin
        with as many blocks of the first sorts share the staircase of these."""
        used = min(len(counts), self.sorts)
        while used and not (counts[used - 1] and mask & self.of_sort[used - 1]):
            used -= 1
        if not used:
            return np.zeros(1, np.int64), np.zeros(1)
        mask &= sum(self.of_sort[:used])
        name = counts[:used], mask
        if name not in self._known:
            own = self._sort_stairs(used - 1, mask & self.of_sort[used - 1], counts[used - 1])
            before = self._stairs(counts[: used - 1], mask)
            known = None if own is None or before is None else _joined(before, own)
            self._known[name] = known
        return self._known[name]

    def _sort_stairs(self, sort: int, mask: int, count: int) -> tuple[Ints, Floats] | None:
        """The staircase of `count` blocks of one sort."""
        chain = self._of_sort.setdefault(
            (sort, mask), [(np.zeros(1, np.int64), np.zeros(1, np.float64))]
        )
        if len(chain) <= count:
            ways = [d for d in range(len(self.items)) if mask >> d & 1]
            one = np.array([0, *self.items.gain[ways]]), np.array([0.0, *self.items.extra[ways]])
        while len(chain) <= count:
            longer = _joined(chain[-1], one)
            if longer is None:
                return None
            chain.append(longer)
        return chain[count]


def _joined(a: tuple[Ints, Floats], b: tuple[Ints, Floats]) -> tuple[Ints, Floats] | None:
    """All sums of two staircases that no other sum beats; None when there are too many."""
    gain = (a[0][:, None] + b[0]).ravel()
    cost = (a[1][:, None] + b[1]).ravel()
    keep = undominated(cost, np.lexsort((cost, -gain)))[::-1]
    return (gain[keep], cost[keep]) if len(keep) <= MOST_LABELS else None
