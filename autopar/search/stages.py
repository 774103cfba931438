"""Cuts and recomputation together: the exact inner search for one mesh, schedule and ZeRO level.

Every interval of blocks as stage i is a column: its cheapest recomputation that fits is a small
knapsack (`knapsack`), and the best columns side by side are a path (`partition`). Knapsacks are
priced lazily: all columns start at the linear relaxation, only those that can still be part of a
best path are solved exactly, and the path is searched again until it is made of exact columns
alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.block_cost import FULL
from autopar.search import knapsack
from autopar.search.band import Band
from autopar.search.chain import Floats, Ints, counts_before, interval_sum
from autopar.search.columns import Columns
from autopar.search.knapsack_frontier import KnapsackFrontiers
from autopar.search.moment_tables import NEVER
from autopar.search.partition import (
    Partition,
    Table,
    at_starts,
    backward_sums,
    best_partition,
    forward_sums,
    smallest_maximum,
)
from autopar.search.windows import Reach, Windows, given

SomeTable = TypeVar("SomeTable", bound=Table)
RATIO_GROUPS = 16
# Columns that are made exact together: few at first, as their prices may rule out the others.
FIRST_BATCH, LARGEST_BATCH = 256, 16384
SINGLES = 96
# Plans of so much more than the least possible seconds are looked at first, and then of more and
# more, unless there are few intervals to look at anyway.
NEAR, FURTHER = 0.05, 4.0
FEW_CELLS = 60_000
# What `recompute` has to be for a block to be recomputed whole, or in part.
WHOLE = ("auto",)
PARTIAL = ("auto", "selective")


@dataclass(frozen=True)
class StageSolution:
    """`cuts[i]` to `cuts[i + 1]` are the blocks of stage i; `recompute[i]` the indexes of those
    that are recomputed whole; `partial[i]` the label of their set for those recomputed in part.

    `kept[i]`: those whose parameters are kept gathered (ZeRO-3); `peaks`: bytes of each stage as
    the tables count them.
    """

    objective: float
    bound: float
    cuts: tuple[int, ...]
    recompute: tuple[tuple[int, ...], ...]
    peaks: tuple[int, ...]
    partial: tuple[Mapping[int, str], ...] = ()
    kept: tuple[tuple[int, ...], ...] = ()


def solve(
    columns: Columns,
    limit: float,
    *,
    recompute: str = "auto",
    starts: Sequence[int] | None = None,
    cutoff: float = np.inf,
) -> StageSolution | None:
    """The best cuts and recomputed blocks whose stages all fit in `limit` bytes.

    `recompute`: `auto`, `selective` (in part, or not), or `none` / `full` for all blocks; `starts`:
    the first block of every stage, when given. None when nothing fits, or nothing is below
    `cutoff` seconds.
    """
    if columns.stages > columns.blocks:
        return None
    if starts is not None:
        windows = given(starts, columns.blocks)
        return _solve(columns, limit, recompute, starts, cutoff, windows)
    reach = Reach(columns, limit, least_seconds(columns, recompute))
    for target, windows in targets(reach, cutoff):
        found = _solve(columns, limit, recompute, None, target, windows)
        if found is not None:
            return found
    return None


def least_seconds(columns: Columns, recompute: str) -> Floats:
    """What every block adds to its stage, wherever it is, and at least."""
    if recompute != FULL:
        return columns.kept
    return columns.kept + columns.whole(lambda way: way.extra)


def targets(reach: Reach, cutoff: float) -> Iterator[tuple[float, Windows]]:
    """Rising targets up to `cutoff`, and the windows of the plans below them. A plan below a target
    is the best of all when none is below the targets before it."""
    last = reach.below(cutoff)
    if last is None:
        return
    more = NEAR
    while last.cells > FEW_CELLS:
        target = reach.bound * (1 + more)
        near = reach.below(target) if target < cutoff else last
        if near is not None and 2 * near.cells > last.cells:
            break
        if near is not None:
            yield target, near
        more *= FURTHER
    yield cutoff, last


def _solve(
    columns: Columns,
    limit: float,
    recompute: str,
    starts: Sequence[int] | None,
    cutoff: float,
    windows: Windows,
) -> StageSolution | None:
    """`solve` within windows."""
    return refined(_Search(columns, limit, recompute, starts, windows), cutoff)


class Refining(Protocol):
    """Column prices of one inner search, from lower bounds to exact."""

    path_seconds: float

    @property
    def table(self) -> Table: ...

    def price_path(self, cuts: tuple[int, ...]) -> bool:
        """Make the columns of a path exact; True when they were already."""

    def price_promising(self, target: float) -> None:
        """Make exact the columns that may be part of a path of less than `target` seconds."""

    def solution(self, found: Partition) -> StageSolution: ...


def refined(search: Refining, cutoff: float) -> StageSolution | None:
    """The best path of exact columns, if it is below `cutoff` seconds."""
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
        self,
        columns: Columns,
        limit: float,
        recompute: str,
        starts: Sequence[int] | None,
        windows: Windows,
    ) -> None:
        self.columns, self.band = columns, Band(columns.blocks, windows.most)
        self.first = np.array(windows.first)
        self.whole = recompute == FULL
        self.count_before = counts_before(columns.which)
        take = self.band
        seconds = take(columns.seconds)
        if self.whole:
            seconds = seconds + take(interval_sum(columns.whole(lambda way: way.extra)))
        fits = take(legal_intervals(columns, limit, starts)) & take.some
        # Bytes per micro-batch that recomputation has to free, for each stage, and those for each
        # item among the recomputed; the limit is compared in whole bytes.
        memory = columns.memory.within(take)
        rows = windows.rows
        shape = (columns.stages, windows.side, windows.most)
        self.need = np.empty(shape, np.int64)
        asked = np.empty((len(memory.kinds), *shape), np.int64)
        for i in range(columns.stages):
            self.need[i], asked[:, i] = memory.needs(i, int(np.floor(limit)), rows[i])
        if self.whole:
            gain = columns.whole(lambda way: way.gain).astype(np.int64)
            freed, held = take(interval_sum(gain)), self._whole_kinds(len(memory.kinds))
            for i, r in enumerate(rows):
                self.need[i] = memory.peaks(i, freed, held)[r] - int(np.floor(limit))
        ways = [w for w in columns.ways if recompute in (WHOLE if w.label == FULL else PARTIAL)]
        self.items = knapsack.items_of(ways, lambda way: asked[way.kind])
        self.frontiers = KnapsackFrontiers(self.items)
        self.thresholds = np.zeros((*self.need.shape, len(self.items)), np.int64)
        for item, kind in enumerate(self.items.kind):
            self.thresholds[..., item] = asked[kind]
        table = np.stack([np.where(fits[r], seconds[r], np.inf) for r in rows])
        self.table = laid_out(Table, table, take, columns, windows)
        self.exact = self.need <= 0
        self.batch = FIRST_BATCH
        self._relax(table)

    def _whole_kinds(self, kinds: int) -> NDArray[np.bool_]:
        """[kind, interval]: where some block is recomputed whole in a way of this kind."""
        found = np.zeros((kinds, *self.band.stop.shape), bool)
        for way in self.columns.ways:
            counts = self.count_before[:, way.sort]
            if way.label == FULL:
                found[way.kind] |= counts[self.band.stop] > counts[self.band.start]
        return found

    def _interval(self, cell: Ints) -> tuple[Ints, Ints, Ints]:
        """Stage, first block and end of cells of the table."""
        stage, row, width = cell
        stop = self.first[stage] + row + 1
        return stage, stop - width - 1, stop

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
        asked = self.thresholds[tuple(cells)]
        held = self.count_before[stop] > self.count_before[start]
        asked = np.where(held[:, self.items.sort], asked, NEVER)
        least = np.maximum(self.need[tuple(cells)], asked.min(axis=1))
        left = least.astype(np.float64)
        extra = np.zeros(len(left))
        for gain_before, cost_before, ratio in self._ratio_groups():
            frees = gain_before[stop] - gain_before[start]
            whole = left >= frees
            extra += np.where(
                whole, cost_before[stop] - cost_before[start], np.maximum(left, 0) * ratio
            )
            left = np.where(whole, left - frees, 0.0)
        table[tuple(cells)] += np.where(left > 0, np.inf, extra)

    def _ratio_groups(self) -> list[tuple[Ints, Floats, float]]:
        """Steps of recomputation in order of seconds per byte, in few groups: prefix sums, and the
        least ratio."""
        groups = []
        steps = knapsack.increments(self.items, range(len(self.items)))
        for members in np.array_split(np.arange(len(steps)), RATIO_GROUPS):
            if len(members):
                some = [steps[i] for i in members]
                counts = self.count_before[:, [i.sort for i in some]]
                gain, cost = np.array([i.gain for i in some]), np.array([i.extra for i in some])
                groups.append((counts @ gain, counts @ cost, min(i.ratio for i in some)))
        return groups

    def price_path(self, cuts: tuple[int, ...]) -> bool:
        """Make the columns of a path exact; True when they were already."""
        cells = self.table.cells_of(cuts)
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
        cells, bound = promising(self.table, self.exact, target)
        if not cells.size:
            return
        cells = cells[:, np.argsort(bound, kind="stable")[: self.batch]]
        self.batch = min(2 * self.batch, LARGEST_BATCH)
        stage, start, stop = self._interval(cells)
        counts = self.count_before[stop] - self.count_before[start]
        need, asked = self.need[tuple(cells)], self.thresholds[tuple(cells)]
        extra = self.frontiers.cheapest(counts, need, asked)
        if extra is None:
            cells = cells[:, :SINGLES]
            extra = np.array([self._knapsack((int(i), int(x), int(y)))[0] for i, x, y in cells.T])
        stage, start, stop = self._interval(cells)
        self.table.seconds[tuple(cells)] = self.columns.seconds[start, stop] + extra
        self.exact[tuple(cells)] = True

    def _plain(self, cell: tuple[int, int, int]) -> float:
        _, start, stop = self._interval(np.array(cell))
        return float(self.columns.seconds[start, stop])

    def _knapsack(self, cell: tuple[int, int, int]) -> tuple[float, list[int]]:
        _, start, stop = self._interval(np.array(cell))
        counts = self.count_before[stop] - self.count_before[start]
        asked = self.thresholds[cell].tolist()
        return knapsack.cheapest(self.items, counts.tolist(), int(self.need[cell]), asked)

    def solution(self, found: Partition) -> StageSolution:
        chosen = [self._ways(i, *found.cuts[i : i + 2]) for i in range(self.columns.stages)]
        number = {(w.sort, w.label): w.kind for w in self.columns.ways}
        peaks = []
        for i, ways in enumerate(chosen):
            kinds = [number[int(self.columns.which[b]), label] for b, label in ways.items()]
            peak = self.columns.memory.peak(i, found.cuts[i], found.cuts[i + 1], kinds)
            peaks.append(peak)
        return StageSolution(
            found.objective,
            found.bound,
            found.cuts,
            tuple(tuple(b for b, label in w.items() if label == FULL) for w in chosen),
            tuple(peaks),
            tuple({b: label for b, label in w.items() if label != FULL} for w in chosen),
        )

    def _ways(self, stage: int, start: int, stop: int) -> dict[int, str]:
        """How each recomputed block of a stage is: its first blocks free the most."""
        if self.whole:
            sorts = {way.sort for way in self.columns.ways if way.label == FULL}
            return {b: FULL for b in range(start, stop) if int(self.columns.which[b]) in sorts}
        _, left = self._knapsack((stage, stop - int(self.first[stage]) - 1, stop - start - 1))
        found = {}
        for block in range(start, stop):
            mine = np.flatnonzero(self.items.sort == self.columns.which[block])
            item = next((int(d) for d in mine[::-1] if left[d] > 0), None)
            if item is not None:
                left[item] -= 1
                found[block] = self.items.labels[item]
        return found


def laid_out(
    kind: type[SomeTable], seconds: Floats, band: Band, columns: Columns, windows: Windows
) -> SomeTable:
    """The table of stages in windows with these `seconds`, which are `inf` from here on where no
    stage can begin."""
    ends = band(columns.end)
    found = kind(
        seconds,
        np.stack([ends[rows] for rows in windows.rows]),
        windows.first,
        columns.blocks,
        columns.microbatches,
    )
    # A stage begins behind a row of the one before it.
    row = np.arange(windows.side)[:, None] - np.arange(band.most)[None, :]
    row = row + np.array(found.shifts)[:, None, None]
    seconds[(row < 0) | (row >= windows.side)] = np.inf
    return found


def promising(table: Table, exact: NDArray[np.bool_], target: float) -> tuple[Ints, Floats]:
    """The cells that are not `exact` and may be part of a path of less than `target` seconds, and
    what such a path takes at least."""
    weight = table.microbatches - 1
    slowest = smallest_maximum(table, table.seconds)
    if not np.isfinite(slowest):
        return np.zeros((3, 0), np.int64), np.zeros(0)
    ahead = forward_sums(table, table.seconds)
    behind = backward_sums(table, table.seconds)
    before = zip(ahead[:-1], table.shifts, strict=True)
    starts = np.stack([at_starts(a, table.most, shift) for a, shift in before])
    through = starts + table.seconds + behind[1:, :, None]
    bound = through if weight == 0 else through + weight * np.maximum(table.seconds, slowest)
    cells = np.array(np.nonzero(~exact & (bound < target)))
    return cells, bound[tuple(cells)]


def legal_intervals(
    columns: Columns, limit: float, starts: Sequence[int] | None
) -> NDArray[np.bool_]:
    """Can be a stage, optimizer step fits, and between two consecutive given cuts if there are
    any."""
    n = columns.blocks
    legal = columns.legal & (columns.memory.scratch <= limit)
    if starts is not None:
        edges = [*starts, n]
        allowed = np.zeros_like(legal)
        for a, b in zip(edges, edges[1:], strict=False):
            allowed[a, b] = True
        legal &= allowed
    return np.asarray(legal)
