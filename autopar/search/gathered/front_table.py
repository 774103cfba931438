"""A table of stages that can each be run in several ways, faster or with a shorter end of the
step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.search.gathered.column import Point
from autopar.search.partition import Floats, Table

Cell = tuple[int, int, int]


@dataclass(frozen=True)
class FrontTable(Table):
    """`seconds` and `end` are of the fastest way of each cell; `slower`: the others, with shorter
    ends, fastest first."""

    slower: dict[Cell, list[Point]] = field(default_factory=dict)

    @property
    def least_end(self) -> Floats:
        found = super().least_end
        for cell, points in self.slower.items():
            found[cell] = min(found[cell], *(p.end for p in points))
        return found

    def within(self, tau: float, eps: float) -> Floats:
        cost = super().within(tau, eps)
        for cell, points in self.slower.items():
            if not np.isfinite(cost[cell]):
                cost[cell] = next(
                    (p.seconds for p in points if p.seconds <= tau and p.end <= eps), np.inf
                )
        return cost

    def maxima(self, cuts: Sequence[int], tau: float, eps: float) -> tuple[float, float]:
        seconds, ends = [], []
        for cell in self.cells_of(cuts):
            ways = [(float(self.seconds[cell]), float(self.end[cell]))]
            ways += [(p.seconds, p.end) for p in self.slower.get(cell, ())]
            taken = next((w for w in ways if w[0] <= tau and w[1] <= eps), ways[0])
            seconds.append(taken[0])
            ends.append(taken[1])
        return max(seconds), max(ends)
