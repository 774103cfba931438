"""Where to cut a chain into stages: min  sum_i T_i + (m - 1) max_i T_i + max_i E_i, exactly.

With caps on the slowest stage (T_i <= tau) and the longest end (E_i <= epsilon) the smallest sum is
a shortest path over the blocks, one dynamic program. A box of caps [tau_lo, tau_hi] x [eps_lo,
eps_hi] can give no less than smallest_sum(tau_hi, eps_hi) + (m - 1) tau_lo + eps_lo. Boxes are
taken in the order of this bound and split until the bound meets the best solution found. A relative
gap of `GAP` counts as closed; it is far below the rounding of the prices.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
GAP = 1e-12


@dataclass(frozen=True)
class Table:
    """`seconds[i]` and `end[i]`: price of stage i with k + 1 blocks, the last of them block
    first[i] + y, at [y, k]; `inf` where there are no such blocks or they do not fit.

    y runs over as many rows for every stage, and k to the most blocks of a stage, less 1.
    """

    seconds: Floats
    end: Floats
    first: tuple[int, ...]
    blocks: int
    microbatches: int

    @property
    def stages(self) -> int:
        return len(self.first)

    @property
    def most(self) -> int:
        return int(self.seconds.shape[2])

    @property
    def shifts(self) -> list[int]:
        """A stage i at [y, k] begins behind row y - k + shift[i] of the stage before it."""
        return [b - a - 1 for a, b in itertools.pairwise((-1, *self.first))]

    @property
    def last_row(self) -> int:
        """Where the last block of the chain is in the last stage."""
        return self.blocks - 1 - self.first[-1]

    @property
    def least_end(self) -> Floats:
        """The least that the end of each stage takes; `inf` where there is none."""
        return np.where(np.isfinite(self.seconds), self.end, np.inf)

    def within(self, tau: float, eps: float) -> Floats:
        """`seconds` of the stages that take no more than `tau`, and end in no more than `eps`."""
        if np.isinf(tau) and np.isinf(eps):
            return self.seconds
        return np.where((self.seconds <= tau) & (self.end <= eps), self.seconds, np.inf)

    def maxima(self, cuts: Sequence[int], tau: float, eps: float) -> tuple[float, float]:
        """The slowest stage and the longest end of a path of `within`."""
        cells = self.cells_of(cuts)
        return max(float(self.seconds[c]) for c in cells), max(float(self.end[c]) for c in cells)

    def edge(self, row: int, value: float) -> Floats:
        """By row: `value` in one of them, `inf` in the others."""
        found = np.full(self.seconds.shape[1], np.inf)
        found[row] = value
        return found

    def cells_of(self, cuts: Sequence[int]) -> list[tuple[int, int, int]]:
        """Where the stages of a path are."""
        pairs = enumerate(itertools.pairwise(cuts))
        return [(i, b - 1 - self.first[i], b - a - 1) for i, (a, b) in pairs]


@dataclass(frozen=True)
class Partition:
    """`cuts[i]` to `cuts[i + 1]` are the blocks of stage i; `bound` holds for any cuts."""

    objective: float
    bound: float
    cuts: tuple[int, ...]


def at_starts(values: Floats, width: int, shift: int) -> Floats:
    """[y, k]: values[y - k + shift], of the stage before by its last block; `inf` beyond."""
    side, low = len(values), shift - (width - 1)
    padded = np.full(side + width - 1, np.inf)
    begin, stop = max(low, 0), min(side + shift, side)
    if begin < stop:
        padded[begin - low : stop - low] = values[begin:stop]
    return np.lib.stride_tricks.sliding_window_view(padded, width)[:, ::-1]


def _behind(table: Floats, shift: int) -> Floats:
    """[y, k] -> [x, k], x the row of the stage before: x = y - k + shift; `inf` beyond."""
    side, width = table.shape
    above = np.full((min(max(shift, 0), side + width), width), np.inf)
    below = np.full((width - 1 + max(-shift, 0), width), np.inf)
    padded = np.concatenate([above, table, below])
    row, column = padded.strides
    begin = padded[max(-shift, 0) :]
    return np.lib.stride_tricks.as_strided(
        begin, (side, width), (row, row + column), writeable=False
    )


def forward_sums(table: Table, cost: Floats) -> Floats:
    """[i, y]: smallest sum of stages 0 .. i-1, with `cost` as prices, such that stage i - 1 ends
    in row y; [0]: before the first stage."""
    sums = [table.edge(0, 0.0)]
    for seconds, shift in zip(cost, table.shifts, strict=True):
        sums.append((at_starts(sums[-1], table.most, shift) + seconds).min(axis=1))
    return np.stack(sums)


def backward_sums(table: Table, cost: Floats) -> Floats:
    """[i, y]: smallest sum of stages i .. p-1 when stage i - 1 ends in row y."""
    sums = [table.edge(table.last_row, 0.0)]
    for seconds, shift in zip(cost[::-1], table.shifts[::-1], strict=True):
        sums.append(_behind(seconds + sums[-1][:, None], shift).min(axis=1))
    return np.stack(sums[::-1])


def smallest_maximum(table: Table, cost: Floats) -> float:
    """The smallest possible value of the dearest stage, with `cost` as prices."""
    best = table.edge(0, -np.inf)
    for seconds, shift in zip(cost, table.shifts, strict=True):
        best = np.maximum(at_starts(best, table.most, shift), seconds).min(axis=1)
    return float(best[table.last_row])


def best_partition(table: Table, cutoff: float = np.inf) -> Partition | None:
    """The best cuts, or None when nothing fits or nothing is below `cutoff`."""
    slowest = smallest_maximum(table, table.seconds)
    if not np.isfinite(slowest):
        return None
    longest_end = smallest_maximum(table, table.least_end)
    weight = table.microbatches - 1
    order = itertools.count()
    boxes = [(-np.inf, next(order), slowest, np.inf, longest_end, np.inf)]
    best, cuts, proven = cutoff, None, np.inf
    while boxes:
        bound, _, tau_lo, tau_hi, eps_lo, eps_hi = heapq.heappop(boxes)
        if bound >= best - GAP * abs(best):
            proven = min(proven, bound)
            break
        found = _smallest_sum(table, tau_hi, eps_hi)
        if found is None:
            continue
        total, path = found
        tau, eps = table.maxima(path, tau_hi, eps_hi)
        if total + weight * tau + eps < best:
            best, cuts = total + weight * tau + eps, path
        bound = total + weight * tau_lo + eps_lo
        if bound >= best - GAP * abs(best):
            proven = min(proven, bound)
            continue
        for box in _split(weight, (tau_lo, tau_hi, eps_lo, eps_hi), tau, eps, best):
            heapq.heappush(boxes, (total + weight * box[0] + box[2], next(order), *box))
    if cuts is None:
        return None
    return Partition(best, min(best, proven), cuts)


Box = tuple[float, float, float, float]


def _split(weight: int, box: Box, tau: float, eps: float, best: float) -> list[Box]:
    """What is left of a box after its cheapest sum was found at (tau, eps): tau or eps is smaller.

    A side on which no more than the tolerated gap can be won is not followed.
    """
    tau_lo, tau_hi, eps_lo, eps_hi = box
    left: list[Box] = []
    if weight * (tau - tau_lo) > GAP * best:
        middle = (tau_lo + tau) / 2
        left.append((tau_lo, middle, eps_lo, eps_hi))
        left.append((middle, float(np.nextafter(tau, -np.inf)), eps_lo, eps_hi))
        tau_lo = tau
    if eps - eps_lo > GAP * best:
        middle = (eps_lo + eps) / 2
        left.append((tau_lo, tau_hi, eps_lo, middle))
        left.append((tau_lo, tau_hi, middle, float(np.nextafter(eps, -np.inf))))
    return left


def _smallest_sum(table: Table, tau: float, eps: float) -> tuple[float, tuple[int, ...]] | None:
    """The smallest sum with no stage above `tau` and no end above `eps`, and its cuts."""
    cost = table.within(tau, eps)
    sums = forward_sums(table, cost)
    row, most = table.last_row, table.most
    total = float(sums[-1, row])
    if not np.isfinite(total):
        return None
    cuts = [table.blocks]
    for i, shift in reversed(list(enumerate(table.shifts))):
        through = (at_starts(sums[i], most, shift)[row] + cost[i][row])[::-1]
        # Of equal ones that which starts first.
        width = most - 1 - int(through.argmin())
        cuts.append(table.first[i] + row - width)
        row += shift - width
    return total, tuple(cuts[::-1])
