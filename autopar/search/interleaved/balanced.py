"""Cuts that balance the work of a chain of unlike blocks, where parts of it take turns.

Near-even numbers of blocks (`cuts`) say little where one block takes as long as three others. So
cuts are looked for by what a schedule of the chain's `Work` takes, whatever the memory: from cuts
at even shares of the work, with whole or lighter first and last parts, and the best near-even ones,
always on from the best that was not looked around yet, by moving borders: some neighbours together,
or two of them apart. What is found within `NEAR` of the best is searched with full prices then, and
what its memory asks for.

The look-around ends after `ALL_NUMBERS` are simulated, so it is bounded for chains of any length.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np

from autopar.cost.wavefronts import seconds_of_many
from autopar.interleaving import DIVIDED, V_SHAPED
from autopar.search.chain import Cutting, Floats, Ints, sums_before
from autopar.search.interleaved.cuts import legal, legal_cuts
from autopar.search.interleaved.times import between, by_rank, ranks_ahead
from autopar.search.interleaved.work import Work

# Cuts so much slower than the best one are kept, up to so many of them.
NEAR, MOST_KEPT = 0.02, 64
# It is looked around cuts so much slower than the best one, and so many of them.
AROUND, MOST_AROUND = 0.01, 12
# Actions that are simulated for one family, and cuts at a time. Where they would be enough for so
# few cuts, cuts at even shares of the work have to do.
ALL_NUMBERS, AT_ONCE, FEWEST = 100_000, 32, 8
# Moves that are thought of at a time.
MOST_MOVES = 2000
# Micro-batches per pp rank of the schedules that are simulated: with more of them balance counts
# for more, and what a schedule takes differs less from one number to the next.
ROUNDS = 4
# Shares of an even part that the first and the last one are tried with.
LIGHTER = (1.0, 0.75, 0.5)


@lru_cache(maxsize=1024)
def balanced(work: Work, rules: Cutting, schedule: str, pp: int, chunks: int) -> Ints:
    """[candidates, parts + 1]: the first block of each part, and the number of blocks."""
    looking = _LookAround(work, rules, schedule, pp, chunks)
    looking.run()
    return looking.found()


class _LookAround:
    def __init__(self, work: Work, rules: Cutting, schedule: str, pp: int, chunks: int) -> None:
        self.rules, self.schedule, self.pp, self.chunks = rules, schedule, pp, chunks
        self.microbatches, self.send = ROUNDS * pp, work.send
        self.turns, self.parts = schedule in V_SHAPED, pp * chunks
        self.divided = schedule in DIVIDED
        tables = work.forward, work.backward, work.weights
        self.forward, self.backward, self.weights = map(sums_before, tables)
        self.whole = work.whole
        self.known: dict[bytes, tuple[float, Ints]] = {}
        self.waiting: list[tuple[float, bytes]] = []
        self.best = float("inf")
        kinds = 3 if self.divided else 2
        self.left = ALL_NUMBERS // (self.parts * self.microbatches * kinds)

    def run(self) -> None:
        """Look around until there is nothing near the best, or enough was simulated."""
        shares = self._legal(self._shares())
        if self.left < FEWEST:
            self.known = {edges.tobytes(): (0.0, edges) for edges in shares}
            return
        even = legal_cuts(self.rules, self.pp, self.chunks, self.turns)
        self._look_at(np.concatenate([shares, even]))
        for _ in range(MOST_AROUND):
            if not self.waiting or self.left <= 0:
                break
            seconds, key = heapq.heappop(self.waiting)
            if seconds > self.best * (1 + AROUND):
                break
            self._look_at(self._legal(self._moves(self.known[key][1])))

    def found(self) -> Ints:
        """What is near the best, best first."""
        near = [row for row in self.known.values() if row[0] <= self.best * (1 + NEAR)]
        near.sort(key=lambda row: (row[0], row[1].tobytes()))
        edges = [row[1] for row in near[:MOST_KEPT]]
        return np.array(edges, np.int64).reshape(-1, self.parts + 1)

    def _legal(self, edges: Ints) -> Ints:
        if not len(edges):
            return edges
        edges = edges[(np.diff(edges, axis=1) > 0).all(axis=1)]
        return legal(edges, self.rules, self.pp, turns=self.turns)

    def _shares(self) -> Ints:
        """Cuts nearest to even shares of the work."""
        ends = self._unit_ends()
        total, units = sums_before(self.whole)[ends], len(ends) - 1
        if units < self.parts:
            return np.zeros((0, self.parts + 1), np.int64)
        found = []
        for first in LIGHTER:
            for last in LIGHTER:
                share = np.ones(self.parts)
                share[0], share[-1] = first, last
                at = np.cumsum(share)[:-1] / share.sum() * total[-1]
                right = np.searchsorted(total, at).clip(1, units)
                left = right - 1
                edge = np.where(at - total[left] <= total[right] - at, left, right)
                # At least one unit in every part.
                number = np.arange(1, self.parts)
                edge = np.maximum.accumulate(edge - number) + number
                edge = edge.clip(number, units - self.parts + number)
                found.append(ends[np.concatenate([[0], edge, [units]])])
        return np.unique(np.array(found, np.int64), axis=0)

    def _unit_ends(self) -> Ints:
        """Where blocks end that make a part together: 0, and behind each unit that may end a part
        and has a parameter."""
        found, holds = [0], 0
        for i, (may_end, has) in enumerate(zip(self.rules.ends, self.rules.holds, strict=True)):
            holds += int(has)
            if may_end and holds:
                found.append(i + 1)
                holds = 0
        blocks = len(self.whole)
        if found[-1] < blocks:  # what is left has none, or can't end: it goes with the last unit
            found[-1:] = [blocks] if len(found) > 1 else [0, blocks]
        return np.array(found, np.int64)

    def _look_at(self, edges: Ints) -> None:
        """Simulate those that are new and may be near the best, as long as it is worth it."""
        forward, backward, weights = self._seconds(edges)
        parts = forward + backward
        loads = self.microbatches * by_rank(parts, self.pp, turns=self.turns)
        least = (ranks_ahead(parts, self.pp) + loads).max(axis=1)
        order = self._new(edges, least)
        if not len(order):
            return
        self.left -= len(order)
        more = weights[order].T if self.divided else None
        given = self.microbatches, self.schedule, self.chunks, more
        seconds = seconds_of_many(forward[order].T, backward[order].T, *given)
        for i, found in zip(order, seconds.tolist(), strict=True):
            key = edges[i].tobytes()
            self.known[key] = found, edges[i]
            heapq.heappush(self.waiting, (found, key))
        self.best = min(self.best, float(seconds.min()))

    def _new(self, edges: Ints, least: Floats) -> list[int]:
        """Of those that take `least` and may be near the best the first that are not known."""
        chosen = np.flatnonzero(least < self.best * (1 + NEAR))
        found: dict[bytes, int] = {}
        for i in chosen[np.argsort(least[chosen], kind="stable")].tolist():
            key = edges[i].tobytes()
            if key not in self.known:
                found.setdefault(key, i)
            if len(found) >= min(AT_ONCE, self.left):
                break
        return list(found.values())

    def _seconds(self, edges: Ints) -> tuple[Floats, Floats, Floats]:
        """[candidates, parts]: forward, backward, and what of that is for weights."""
        leaving = self.send[edges[:, 1:] - 1]
        leaving[:, -1] = 0
        if self.turns:
            leaving[:, self.pp - 1] = 0
        forward, backward = between(self.forward, edges), between(self.backward, edges)
        weights = between(self.weights, edges)
        backward[:, 1:] += leaving[:, :-1]
        # The first part has no first half.
        weights[:, 0] = backward[:, 0]
        forward = forward + leaving
        return forward.astype(float), backward.astype(float), weights.astype(float)

    def _moves(self, edges: Ints) -> Ints:
        """Cuts near one: neighbouring borders moved together, and two borders apart."""
        borders = self.parts - 1
        apart = max(1, min(borders, MOST_MOVES // (6 * borders)))
        first, behind = np.arange(borders)[:, None], np.arange(apart)[None, :]
        first, last = (x.ravel() for x in np.broadcast_arrays(first, first + behind))
        first, last = first[last < borders], last[last < borders]
        number = np.arange(borders)[None, :]
        together = ((number >= first[:, None]) & (number <= last[:, None])).astype(np.int64)
        ends = [(number == x[:, None]).astype(np.int64) for x in (first, last)]
        one, two = (x[first < last] for x in ends)
        single = np.eye(borders, dtype=np.int64)
        steps = [*(d * together for d in (-1, 1)), *(d * single for d in (-2, 2))]
        steps += [a * one + b * two for a in (-1, 1) for b in (-1, 1)]
        moved = np.concatenate(steps)
        found = np.repeat(edges[None, :], len(moved), axis=0)
        found[:, 1:-1] += moved
        return found
