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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
GAP = 1e-12


@dataclass(frozen=True)
class Table:
    """`seconds[i]` and `end[i]`: price of stage i with k + 1 blocks, the last of them block y + i,
    at [y, k]; `inf` where there are no such blocks or they do not fit.

    With n blocks and p stages y runs from 0 to n - p; k to the most blocks of a stage, less 1.
    """

    seconds: Floats
    end: Floats
    microbatches: int

    @property
    def stages(self) -> int:
        return int(self.seconds.shape[0])

    @property
    def side(self) -> int:
        return int(self.seconds.shape[1])


@dataclass(frozen=True)
class Partition:
    """`cuts[i]` to `cuts[i + 1]` are the blocks of stage i, as offsets; `bound` holds for any."""

    objective: float
    bound: float
    cuts: tuple[int, ...]


def at_starts(values: Floats, width: int) -> Floats:
    """[y, k]: of `values` by x the one of a stage's start, x = y - k; `inf` where there is none."""
    padded = np.concatenate([np.full(width - 1, np.inf), values])
    return np.lib.stride_tricks.sliding_window_view(padded, width)[:, ::-1]


def _by_start(table: Floats) -> Floats:
    """[x, k] of a table [y, k], with x = y - k; `inf` beyond the chain."""
    side, width = table.shape
    padded = np.concatenate([table, np.full((width - 1, width), np.inf)])
    row, column = padded.strides
    return np.lib.stride_tricks.as_strided(
        padded, (side, width), (row, row + column), writeable=False
    )


def forward_sums(cost: Floats) -> Floats:
    """[i, x]: smallest sum of stages 0 .. i-1 such that stage i starts at block i + x."""
    stages, side, width = cost.shape
    sums = np.full((stages + 1, side), np.inf)
    sums[0, 0] = 0.0
    for i in range(stages):
        # A stage i at [y, k] ends with block y + i: stage i + 1 starts behind it, at offset y.
        sums[i + 1] = (at_starts(sums[i], width) + cost[i]).min(axis=1)
    return sums


def backward_sums(cost: Floats) -> Floats:
    """[i, x]: smallest sum of stages i .. p-1 when stage i starts at block i + x."""
    stages, side, _ = cost.shape
    sums = np.full((stages + 1, side), np.inf)
    sums[stages, side - 1] = 0.0
    for i in reversed(range(stages)):
        sums[i] = _by_start(cost[i] + sums[i + 1][:, None]).min(axis=1)
    return sums


def smallest_maximum(cost: Floats) -> float:
    """The smallest possible value of the dearest stage."""
    stages, side, width = cost.shape
    best = np.full(side, np.inf)
    best[0] = -np.inf
    for i in range(stages):
        best = np.maximum(at_starts(best, width), cost[i]).min(axis=1)
    return float(best[side - 1])


def best_partition(table: Table, cutoff: float = np.inf) -> Partition | None:
    """The best cuts, or None when nothing fits or nothing is below `cutoff`."""
    usable = np.isfinite(table.seconds)
    slowest = smallest_maximum(table.seconds)
    if not np.isfinite(slowest):
        return None
    longest_end = smallest_maximum(np.where(usable, table.end, np.inf))
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
        tau, eps = _maxima(table, path)
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
    cost = table.seconds
    if np.isfinite(tau) or np.isfinite(eps):
        cost = np.where((cost <= tau) & (table.end <= eps), cost, np.inf)
    sums = forward_sums(cost)
    total = float(sums[-1, table.side - 1])
    if not np.isfinite(total):
        return None
    cuts, width = [table.side - 1], cost.shape[2]
    for i in reversed(range(table.stages)):
        y = cuts[-1]
        through = (at_starts(sums[i], width)[y] + cost[i][y])[::-1]
        # Of equal ones that which starts first.
        cuts.append(y - (width - 1 - int(through.argmin())))
    offsets = cuts[::-1]
    return total, tuple(x + i for i, x in enumerate(offsets))


def cells_of(cuts: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Where the stages of a path are in a table."""
    return [(i, b - i - 1, b - a - 1) for i, (a, b) in enumerate(itertools.pairwise(cuts))]


def _maxima(table: Table, cuts: tuple[int, ...]) -> tuple[float, float]:
    cells = cells_of(cuts)
    return (
        float(max(table.seconds[c] for c in cells)),
        float(max(table.end[c] for c in cells)),
    )
