"""Seconds that a stage takes at least, whatever is recomputed or kept gathered: of all intervals at
once.

All blocks are kept and nothing is recomputed, which is fastest, and what does not fit is freed by
the linear relaxation of both choices: a block that is resharded frees what it gathers once, one
that is recomputed what it saved for every micro-batch in flight. Each moment of a step asks for as
much on its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.block_cost import FULL
from autopar.cost.setting import Phase
from autopar.search import knapsack
from autopar.search.band import Band
from autopar.search.chain import Floats, Ints, counts_before, interval_sum
from autopar.search.gathered.prices import Prices
from autopar.search.stages import RATIO_GROUPS


@dataclass(frozen=True)
class _Step:
    """Something that frees bytes of a block of a sort, for each of the micro-batches in flight or
    once, and its seconds."""

    sort: int
    each: int
    once: int
    seconds: float

    def frees(self, in_flight: int) -> int:
        return in_flight * self.each + self.once


class Relaxed:
    """Lower bounds under `limit` bytes, of the intervals of a `band`."""

    def __init__(self, prices: Prices, limit: int, band: Band) -> None:
        self.prices, self.limit, self.band = prices, limit, band
        self.memory = prices.kept.memory.within(band)
        self.counts = counts_before(prices.chain.which)
        self.steps = _steps(prices)
        self.freed = np.zeros_like(self.memory.flight)
        self.plain = band(prices.kept.seconds)
        if prices.recompute == FULL:
            # Resharded: it hides more.
            table = prices.resharded
            extra = table.whole(lambda way: way.extra)
            self.plain = self.plain + band(interval_sum(extra))
            self.freed = band(interval_sum(table.whole(lambda way: way.gain).astype(np.int64)))

    def seconds(self, stage: int, rows: slice) -> Floats:
        """Of the intervals in some rows; `inf` where nothing frees enough."""
        start, stop = self.band.start[rows], self.band.stop[rows]
        extra = np.zeros(start.shape)
        for phase in self.memory.phases[stage]:
            missing = self._missing(phase, rows)
            if (missing > 0).any():
                extra = np.maximum(extra, self._least(missing, phase.in_flight, start, stop))
        return np.asarray(self.plain[rows] + extra)

    def _missing(self, phase: Phase, rows: slice) -> Ints:
        """Bytes beyond the limit at one moment; recomputation frees for all micro-batches."""
        k, found, flight = phase.in_flight, self.memory.moments(phase), self.memory.flight[rows]
        over = self.memory.fixed[rows] + k * flight - self.limit
        missing = np.minimum(over + found.floor[rows], over - flight + found.plain[rows])
        return np.asarray(missing - k * self.freed[rows])

    def _least(self, missing: Ints, in_flight: int, start: Ints, stop: Ints) -> Floats:
        left = np.maximum(missing, 0).astype(np.float64)
        extra = np.zeros(left.shape)
        steps = [s for s in self.steps if s.frees(in_flight) > 0]
        steps.sort(key=lambda s: s.seconds / s.frees(in_flight))
        for members in np.array_split(np.arange(len(steps)), RATIO_GROUPS):
            if not len(members):
                continue
            some = [steps[i] for i in members]
            counts = self.counts[:, [s.sort for s in some]]
            frees = counts @ np.array([s.frees(in_flight) for s in some], np.int64)
            cost = counts @ np.array([s.seconds for s in some])
            mine, price = frees[stop] - frees[start], cost[stop] - cost[start]
            ratio = min(s.seconds / s.frees(in_flight) for s in some)
            whole = left >= mine
            extra += np.where(whole, price, left * ratio)
            left = np.where(whole, left - mine, 0.0)
        return np.asarray(np.where(left > 0, np.inf, extra))


def _steps(prices: Prices) -> list[_Step]:
    """Resharding a block of each sort, and the steps of recomputing it as if it were resharded,
    when that hides the most."""
    gathered = prices.moments.gathered(frozenset())
    which = prices.chain.which
    found = []
    for sort in range(prices.sorts):
        block = int(np.flatnonzero(which == sort)[0])
        found.append(_Step(sort, 0, int(gathered[block]), max(0.0, float(prices.saves[block]))))
    items = prices.items
    mine = [d for d in range(len(items)) if items.sort[d] < prices.sorts]
    for step in knapsack.increments(items, mine):
        found.append(_Step(step.sort, step.gain, 0, step.extra))
    return found
