"""Cuts and recomputation together: the exact inner search for one mesh, schedule and ZeRO level.

Every interval of blocks as stage i is a column: its cheapest recomputation that fits is a small
knapsack (`knapsack`), and the best columns side by side are a path (`partition`). Knapsacks are
priced lazily: all columns start at the linear relaxation, only those that can still be part of a
best path are solved exactly, and the path is searched again until it is made of exact columns
alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.search import knapsack
from autopar.search.columns import Columns, Floats, Ints, interval_max, interval_sum
from autopar.search.partition import (
    Partition,
    Table,
    backward_sums,
    best_partition,
    forward_sums,
    smallest_maximum,
)

RATIO_GROUPS = 16
BATCH = 20000
SINGLES = 96


@dataclass(frozen=True)
class StageSolution:
    """`cuts[i]` to `cuts[i + 1]` are the blocks of stage i; `recompute[i]` their indexes.

    `peaks`: bytes of each stage as the tables count them.
    """

    objective: float
    bound: float
    cuts: tuple[int, ...]
    recompute: tuple[tuple[int, ...], ...]
    peaks: tuple[int, ...]


def solve(
    columns: Columns,
    limit: float,
    *,
    recompute: str = "auto",
    starts: Sequence[int] | None = None,
    cutoff: float = np.inf,
) -> StageSolution | None:
    """The best cuts and recomputed blocks whose stages all fit in `limit` bytes.

    `recompute`: `auto`, or `none` / `full` for all blocks; `starts`: the first block of every
    stage, when given. None when nothing fits, or nothing is below `cutoff` seconds.
    """
    if columns.stages > columns.blocks:
        return None
    search = _Search(columns, limit, recompute, starts)
    best: Partition | None = None
    while True:
        found = best_partition(search.table, best.objective if best else cutoff)
        if found is None:
            return search.solution(best) if best else None
        if search.price_path(found.cuts):
            return search.solution(found)
        seconds = search.path_seconds
        if seconds < (best.objective if best else cutoff):
            best = Partition(seconds, seconds, found.cuts)
        search.price_promising(best.objective if best else cutoff)


class _Search:
    """Column prices of one inner search, from relaxed to exact."""

    def __init__(
        self, columns: Columns, limit: float, recompute: str, starts: Sequence[int] | None
    ) -> None:
        self.columns = columns
        self.side = columns.blocks - columns.stages + 1
        self.full = recompute == "full"
        self.items, self.which = knapsack.distinct_items(columns.extra, columns.gain, columns.saved)
        if recompute != "auto":
            self.items, self.which = _no_items(columns.blocks)
        one_hot = self.which[:, None] == np.arange(len(self.items))[None, :]
        self.count_before = np.concatenate(
            [np.zeros((1, len(self.items)), np.int64), np.cumsum(one_hot, axis=0)]
        )
        seconds, flight, rebuilt = columns.seconds, columns.flight, None
        if self.full:
            seconds = seconds + interval_sum(columns.extra)
            flight = flight - interval_sum(columns.gain)
            rebuilt = interval_max(columns.saved)
        fits = legal_intervals(columns, limit, starts)
        base = columns.fixed if rebuilt is None else columns.fixed + rebuilt
        # Bytes that recomputation has to free, per stage; the limit is compared in whole bytes.
        self.need = np.stack(
            [
                self._window(base + k * flight, i) - int(np.floor(limit))
                for i, k in enumerate(columns.in_flight)
            ]
        )
        table = np.stack(
            [
                np.where(self._window(fits, i), self._window(seconds, i), np.inf)
                for i in range(columns.stages)
            ]
        )
        self.exact = self.need <= 0
        self._relax(table)
        end = np.stack([self._window(columns.end, i) for i in range(columns.stages)])
        self.table = Table(table, end, columns.microbatches)

    def _window(self, table: NDArray[np.generic], stage: int) -> NDArray[np.generic]:
        return table[stage : stage + self.side, stage + 1 : stage + 1 + self.side]

    def _interval(self, cell: Ints) -> tuple[Ints, Ints, Ints]:
        """Stage, first block and end of cells given as [stage, row, column]."""
        stage, row, column = cell
        return stage, row + stage, column + stage + 1

    def _relax(self, table: Floats) -> None:
        """Add the linear relaxation of every knapsack; `inf` where even all is too little."""
        cells = np.array(np.nonzero(~self.exact & np.isfinite(table)))
        if not cells.size:
            return
        if not len(self.items):
            table[tuple(cells)] = np.inf
            self.exact[:] = True
            return
        stage, start, stop = self._interval(cells)
        k = np.array(self.columns.in_flight, np.int64)[stage]
        left = (self.need[tuple(cells)] + self.items.saved.min()).astype(np.float64)
        extra = np.zeros(len(left))
        for gain_before, cost_before, ratio in self._ratio_groups():
            frees = k * (gain_before[stop] - gain_before[start])
            whole = left >= frees
            extra += np.where(
                whole, cost_before[stop] - cost_before[start], np.maximum(left, 0) / k * ratio
            )
            left = np.where(whole, left - frees, 0.0)
        table[tuple(cells)] += np.where(left > 0, np.inf, extra)

    def _ratio_groups(self) -> list[tuple[Ints, Floats, float]]:
        """Items in order of seconds per byte, in few groups: prefix sums, and the least ratio."""
        groups = []
        for members in np.array_split(np.arange(len(self.items)), RATIO_GROUPS):
            if len(members):
                counts = self.count_before[:, members]
                gain, cost = self.items.gain[members], self.items.extra[members]
                ratio = float((cost / gain).min())
                groups.append((counts @ gain, counts @ cost, ratio))
        return groups

    def price_path(self, cuts: tuple[int, ...]) -> bool:
        """Make the columns of a path exact; True when they were already."""
        cells = [(i, cuts[i] - i, cuts[i + 1] - i - 1) for i in range(self.columns.stages)]
        open_cells = [c for c in cells if not self.exact[c]]
        for cell in open_cells:
            self.table.seconds[cell] = self._plain(cell) + self._knapsack(cell)[0]
            self.exact[cell] = True
        seconds = [float(self.table.seconds[c]) for c in cells]
        self.path_seconds = float("inf")
        if max(seconds) < float("inf"):
            weight = self.columns.microbatches - 1
            end = max(float(self.table.end[c]) for c in cells)
            self.path_seconds = sum(seconds) + weight * max(seconds) + end
        return not open_cells

    def price_promising(self, target: float) -> None:
        """Make exact the columns that may be part of a path of less than `target` seconds."""
        table, weight = self.table, self.columns.microbatches - 1
        slowest = smallest_maximum(table.seconds)
        if not np.isfinite(slowest):
            return
        ahead, behind = forward_sums(table.seconds), backward_sums(table.seconds)
        through = ahead[:-1, :, None] + table.seconds + behind[1:, None, :]
        bound = through if weight == 0 else through + weight * np.maximum(table.seconds, slowest)
        cells = np.array(np.nonzero(~self.exact & (bound < target)))
        if not cells.size:
            return
        order = np.argsort(bound[tuple(cells)], kind="stable")[:BATCH]
        cells = cells[:, order]
        stage, start, stop = self._interval(cells)
        counts = self.count_before[stop] - self.count_before[start]
        k = np.array(self.columns.in_flight, np.int64)[stage]
        extra = knapsack.cheapest_many(self.items, counts, self.need[tuple(cells)], k)
        if extra is None:
            cells = cells[:, :SINGLES]
            extra = np.array([self._knapsack((int(i), int(x), int(y)))[0] for i, x, y in cells.T])
        stage, start, stop = self._interval(cells)
        table.seconds[tuple(cells)] = self.columns.seconds[start, stop] + extra
        self.exact[tuple(cells)] = True

    def _plain(self, cell: tuple[int, int, int]) -> float:
        stage, row, column = cell
        return float(self.columns.seconds[row + stage, column + stage + 1])

    def _knapsack(self, cell: tuple[int, int, int]) -> tuple[float, list[int]]:
        stage, row, column = cell
        counts = self.count_before[column + stage + 1] - self.count_before[row + stage]
        k = self.columns.in_flight[stage]
        return knapsack.cheapest(self.items, counts.tolist(), int(self.need[cell]), k)

    def solution(self, found: Partition) -> StageSolution:
        recompute = []
        for i in range(self.columns.stages):
            start, stop = found.cuts[i], found.cuts[i + 1]
            if self.full:
                recompute.append(tuple(range(start, stop)))
                continue
            _, left = self._knapsack((i, start - i, stop - i - 1))
            chosen = []
            for block in range(start, stop):
                item = int(self.which[block])
                if item >= 0 and left[item] > 0:
                    left[item] -= 1
                    chosen.append(block)
            recompute.append(tuple(chosen))
        peaks = tuple(
            _peak(self.columns, i, found.cuts[i], found.cuts[i + 1], again)
            for i, again in enumerate(recompute)
        )
        return StageSolution(found.objective, found.bound, found.cuts, tuple(recompute), peaks)


def _peak(columns: Columns, stage: int, start: int, stop: int, recompute: Sequence[int]) -> int:
    """Bytes of one stage with the given blocks recomputed."""
    chosen = list(recompute)
    freed = columns.in_flight[stage] * int(columns.gain[chosen].sum())
    rebuilt = int(columns.saved[chosen].max()) if chosen else 0
    kept = int(columns.flight[start, stop]) * columns.in_flight[stage]
    return max(
        int(columns.fixed[start, stop]) + kept - freed + rebuilt, int(columns.scratch[start, stop])
    )


def _no_items(blocks: int) -> tuple[knapsack.Items, Ints]:
    none = np.zeros(0, np.int64)
    return knapsack.Items(np.zeros(0), none, none), np.full(blocks, -1, np.int64)


def legal_intervals(
    columns: Columns, limit: float, starts: Sequence[int] | None
) -> NDArray[np.bool_]:
    """Not empty, optimizer step fits, and between two consecutive given cuts if there are any."""
    n = columns.blocks
    legal = np.arange(n + 1)[None, :] > np.arange(n)[:, None]
    legal &= columns.scratch <= limit
    if starts is not None:
        edges = [*starts, n]
        allowed = np.zeros_like(legal)
        for a, b in zip(edges, edges[1:], strict=False):
            allowed[a, b] = True
        legal &= allowed
    return np.asarray(legal)
