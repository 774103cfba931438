"""Cuts, recomputation and kept parameters together: the exact inner search of ZeRO-3.

As `search.stages`: columns start at a lower bound (`relaxed`), those that can be part of a best
path are priced exactly (`column`), and the path is searched again until it is made of exact columns
alone. Of alike blocks in a stage the last ones are kept, and the first of the stage apart from
them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from autopar.block_cost import FULL
from autopar.cost.setting import Setting
from autopar.search.band import Band
from autopar.search.chain import Chain
from autopar.search.gathered.column import Point, best_of, points
from autopar.search.gathered.front_table import Cell, FrontTable
from autopar.search.gathered.moments import StageMoments
from autopar.search.gathered.prices import Prices
from autopar.search.gathered.relaxed import Relaxed
from autopar.search.partition import Partition
from autopar.search.stages import (
    StageSolution,
    laid_out,
    legal_intervals,
    promising,
    refined,
    targets,
)
from autopar.search.windows import Reach, Windows, given

# Columns that are made exact together, at first and at most.
FIRST_BATCH, LARGEST_BATCH = 16, 256


def solve(
    chain: Chain,
    setting: Setting,
    limit: float,
    *,
    recompute: str = "auto",
    starts: Sequence[int] | None = None,
    cutoff: float = np.inf,
    kept: Collection[str] | None = None,
) -> StageSolution | None:
    """The best cuts, recomputed and kept blocks under ZeRO-3 whose stages all fit in `limit` bytes.

    `kept`: the blocks that are kept gathered, if that is no choice; the rest as for
    `stages.solve`. None when nothing fits, or nothing is below `cutoff` seconds.
    """
    if setting.mesh.pp > len(chain):
        return None
    prices = Prices.of(chain, setting, recompute, kept)
    if starts is not None:
        windows = given(starts, len(chain))
        return refined(_Search(prices, limit, starts, windows, cutoff), cutoff)
    reach = Reach(prices.least, limit, prices.least.kept)
    for target, windows in targets(reach, cutoff):
        found = refined(_Search(prices, limit, None, windows, target), target)
        if found is not None:
            return found
    return None


def least_peak(
    chain: Chain,
    setting: Setting,
    recompute: str,
    starts: Sequence[int] | None,
    kept: Collection[str],
    most: int,
) -> int:
    """The smallest limit that a plan with these `kept` blocks fits in. `most`: a limit to start
    from, near it; some cut is legal."""

    def fits(limit: int) -> bool:
        found = solve(chain, setting, limit, recompute=recompute, starts=starts, kept=kept)
        return found is not None

    while not fits(most):
        most *= 2
    least = 0
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if fits(middle) else (middle + 1, most)
    return most


class _Search:
    """Column prices of one inner search, from lower bounds to exact."""

    def __init__(
        self,
        prices: Prices,
        limit: float,
        starts: Sequence[int] | None,
        windows: Windows,
        cutoff: float,
    ) -> None:
        self.prices, self.limit = prices, int(np.floor(limit))
        self.first = windows.first
        least = prices.least
        self.weight = least.microbatches
        # The slowest stage is worked through for every micro-batch.
        self.cap = cutoff / self.weight
        band = Band(least.blocks, windows.most)
        fits = band(legal_intervals(least, limit, starts)) & band.some
        rows = windows.rows
        relaxed = Relaxed(prices, self.limit, band)
        seconds = np.stack([relaxed.seconds(i, r) for i, r in enumerate(rows)])
        seconds[~np.stack([fits[r] for r in rows])] = np.inf
        self.table = laid_out(FrontTable, seconds, band, least, windows)
        self.exact = np.zeros(seconds.shape, bool)
        self.points: dict[Cell, list[Point]] = {}
        self.batch = FIRST_BATCH
        self.path_seconds = float("inf")

    def _interval(self, cell: Cell) -> tuple[int, int, int]:
        """Stage, first block and end of a cell of the table."""
        stage, row, width = cell
        stop = self.first[stage] + row + 1
        return stage, stop - width - 1, stop

    def _price(self, cell: Cell) -> None:
        found = points(self.prices, *self._interval(cell), self.limit, self.cap)
        self.points[cell], self.exact[cell] = found, True
        self.table.seconds[cell] = found[0].seconds if found else np.inf
        if found:
            self.table.end[cell] = found[0].end
        if found[1:]:
            self.table.slower[cell] = found[1:]

    def price_path(self, cuts: tuple[int, ...]) -> bool:
        cells = self.table.cells_of(cuts)
        open_cells = [c for c in cells if not self.exact[c]]
        for cell in open_cells:
            self._price(cell)
        self.path_seconds, _ = best_of([self.points[c] for c in cells], self.weight)
        return not open_cells

    def price_promising(self, target: float) -> None:
        cells, bound = promising(self.table, self.exact, target)
        for place in np.argsort(bound, kind="stable")[: self.batch]:
            stage, row, width = (int(x) for x in cells[:, place])
            self._price((stage, row, width))
        self.batch = min(2 * self.batch, LARGEST_BATCH)

    def solution(self, found: Partition) -> StageSolution:
        cells = self.table.cells_of(found.cuts)
        _, chosen = best_of([self.points[c] for c in cells], self.weight)
        ways, kept, peaks = [], [], []
        for cell, point in zip(cells, chosen, strict=True):
            stage, start, stop = self._interval(cell)
            mine = self._ways(point, start)
            ways.append(mine)
            kept.append(tuple(start + i for i, keep in enumerate(point.kept) if keep))
            peaks.append(self._peak(point, mine, stage, start, stop))
        return StageSolution(
            found.objective,
            found.bound,
            found.cuts,
            tuple(tuple(b for b, label in w.items() if label == FULL) for w in ways),
            tuple(peaks),
            tuple({b: label for b, label in w.items() if label != FULL} for w in ways),
            tuple(kept),
        )

    def _ways(self, point: Point, start: int) -> dict[int, str]:
        """How each recomputed block of a stage is: of alike ones the first blocks free the most."""
        if self.prices.recompute == FULL:
            sorts, which = {w.sort for w in self.prices.whole}, self.prices.chain.which
            here = range(start, start + len(point.kept))
            return {block: FULL for block in here if int(which[block]) in sorts}
        items, left, found = self.prices.items, list(point.taken), {}
        if not left:
            return {}
        for offset, keep in enumerate(point.kept):
            sort = int(self.prices.chain.which[start + offset]) + keep * self.prices.sorts
            mine = np.flatnonzero(items.sort == sort)
            item = next((int(d) for d in mine[::-1] if left[d] > 0), None)
            if item is not None:
                left[item] -= 1
                found[start + offset] = items.labels[item]
        return found

    def _peak(self, point: Point, ways: dict[int, str], stage: int, start: int, stop: int) -> int:
        which = self.prices.chain.which
        named = {(w.sort, w.label): w for w in self.prices.resharded.ways}
        mine = [named[int(which[block]), label] for block, label in ways.items()]
        kept = np.array([point.kept], np.bool_)
        moments = StageMoments(self.prices.moments, stage, start, stop, kept)
        return int(moments.peaks(sum(w.gain for w in mine), {w.kind for w in mine})[0])
