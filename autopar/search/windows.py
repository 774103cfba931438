"""Where the stages of a chain can begin and end when a step shall be below a target.

A step takes at least  sum of all blocks + (m - 1) max_i T_i + max_i E_i,  so a target caps the
slowest stage, and memory caps what a stage can hold. Filling every stage to its cap from the front
gives the furthest block that each can end with, and from the back the nearest. Of a thousand blocks
on a hundred stages that leaves each stage a few dozen to end with, where a target is close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.search.chain import Floats, Ints, sums_before
from autopar.search.columns import Columns

# Sums of many seconds differ in their last digits with their order.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Windows:
    """The last block of stage i is one of `side` from `first[i]` on; no stage has more than `most`
    blocks."""

    first: tuple[int, ...]
    side: int
    most: int

    @property
    def rows(self) -> list[slice]:
        """Of a table by last block, those of each stage."""
        return [slice(first, first + self.side) for first in self.first]

    @property
    def cells(self) -> int:
        """How many intervals are looked at."""
        return len(self.first) * self.side * self.most


def given(starts: Sequence[int], blocks: int) -> Windows:
    """Those of given first blocks."""
    spans = list(pairwise([*starts, blocks]))
    return Windows(tuple(b - 1 for _, b in spans), 1, max(b - a for a, b in spans))


class Reach:
    """How far stages reach, for one configuration. `least`: seconds that every block adds to its
    stage at least."""

    def __init__(self, columns: Columns, limit: float, least: Floats) -> None:
        self.columns, self.limit = columns, limit
        self.seconds = sums_before(least)
        self.kept = sums_before(columns.memory.intervals.least)
        self.longest = float(least.max())
        n, p = columns.blocks, columns.stages
        # What the ranks do at the end of a step, evenly spread.
        self.end = float(columns.ended.sum()) / p
        self.phases = columns.memory.phases
        self.early, self.late = np.arange(1, p + 1), np.arange(n - p + 1, n + 1)

    @property
    def bound(self) -> float:
        """No step takes less."""
        total = float(self.seconds[-1])
        slowest = max(total / self.columns.stages, self.longest)
        return total + (self.columns.microbatches - 1) * slowest + self.end

    def below(self, target: float) -> Windows | None:
        """Windows of all plans below `target` seconds that fit; None when there are none."""
        weight, p = self.columns.microbatches - 1, self.columns.stages
        cap = np.inf
        if weight and np.isfinite(target):
            cap = (target - self.end - float(self.seconds[-1])) / weight
            cap += ROUNDING * max(target, target / weight)
        furthest, nearest = np.array(self.early), np.array(self.late)
        edge = 0
        for i in range(p):
            edge = max(edge, self._furthest(i, edge, cap))
            furthest[i] = min(edge, self.late[i])
        edge = self.columns.blocks
        for i in reversed(range(p)):
            nearest[i] = max(edge, self.early[i])
            edge = min(edge, self._nearest(i, edge, cap))
        if edge > 0 or (nearest > furthest).any():
            return None
        return self._windows(nearest, furthest, cap)

    def _windows(self, nearest: Ints, furthest: Ints, cap: float) -> Windows:
        """Of the nearest and furthest end (exclusive) of every stage."""
        n = self.columns.blocks
        side = int((furthest - nearest).max()) + 1
        first = np.minimum(nearest - 1, n - side)
        ends = first[:, None] + 1 + np.arange(side)[None, :]
        begins = np.concatenate([[0], nearest[:-1]])[:, None]
        if np.isfinite(cap):
            by_time = np.searchsorted(self.seconds, self.seconds[ends] - cap, "left")
            begins = np.maximum(begins, by_time)
        most = int((ends - begins).max())
        return Windows(tuple(first.tolist()), side, max(1, most))

    def _furthest(self, stage: int, start: int, cap: float) -> int:
        """The end of the longest stage that begins with block `start`; `start` if none can."""
        if start == self.columns.blocks:
            return start
        end = int(np.searchsorted(self.seconds, self.seconds[start] + cap, "right")) - 1
        fits = self._bytes(stage, start, slice(start + 1, None)) <= self.limit
        return min(end, start + int(np.count_nonzero(fits)))

    def _nearest(self, stage: int, end: int, cap: float) -> int:
        """The first block of the longest stage that ends before block `end`; `end` if none can."""
        if end == 0:
            return end
        start = int(np.searchsorted(self.seconds, self.seconds[end] - cap, "left"))
        fits = self._bytes(stage, slice(None, end), end) <= self.limit
        return max(start, end - int(np.count_nonzero(fits)))

    def _bytes(self, stage: int, start: int | slice, end: int | slice) -> Ints:
        """No stage has less; longer ones have no less than those inside them."""
        memory = self.columns.memory
        kept = self.kept[end] - self.kept[start]
        found = memory.scratch[start, end]
        for phase in self.phases[stage]:
            states = memory.fixed[start, end]
            if not phase.first:
                states = states + memory.intervals.gradients[start, end]
            found = np.maximum(found, states + phase.in_flight * kept)
        return np.asarray(found)
