"""Cuts that balance the work of a chain of unlike blocks, where parts of it take turns.

Near-even numbers of blocks (`cuts`) say little where one block takes as long as three others. So
cuts are looked for by what a schedule of the chain's `Work` takes, whatever the memory. A
population begins with cuts at even shares of the work and the best near-even ones; its best are put
together and changed by chance (`moves`, from a fixed seed) as long as that finds better ones; at
last it is looked at all cuts near the best. What is found within `NEAR` of the best is searched
with full prices then, and what its memory asks for.

All ends after `ACTIONS` are simulated, so it is bounded for chains of any length.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from autopar.cost.wavefronts import seconds_of_many
from autopar.interleaving import DIVIDED, V_SHAPED
from autopar.search.chain import Cutting, Floats, Ints, sums_before
from autopar.search.interleaved.cuts import legal, legal_cuts
from autopar.search.interleaved.moves import (
    at_shares,
    children,
    distinct,
    neighbours,
    numbers,
    places,
)
from autopar.search.interleaved.times import between, busy_at_least, by_rank
from autopar.search.interleaved.work import Work

# Cuts so much slower than the best one are kept, up to so many of them.
NEAR, MOST_KEPT = 0.02, 64
# Of near-even cuts of a long chain those are searched whose work is the most even.
MOST_EVEN = 256
# The population; how often, and from how many children at a time, it is renewed, unless that gained
# less than so much so often; and how often it is looked around the best.
POPULATION, ROUNDS, CHILDREN = 64, 8, 1536
FEW_CHILDREN = 384  # of alike blocks, where there is little to find
GAIN, IDLE, MOST_AROUND = 0.001, 3, 3
# Cuts are simulated whose bound is so near the best.
WORTH = 0.05
# Actions that are simulated for one family, and cuts at a time: more at once cost little more.
# Where they would be enough for so few cuts, cuts at even shares of the work have to do.
# Even shares come nearer to the best the more blocks there are: of longer chains it is fewer.
ACTIONS, AT_ONCE, FEWEST = 3_000_000, 512, 100
LONG = 128


@lru_cache(maxsize=1024)
def balanced(work: Work, rules: Cutting, schedule: str, pp: int, chunks: int) -> Ints:
    """[candidates, parts + 1]: the first block of each part, and the number of blocks: the
    near-even cuts, and what was found."""
    looking = _Looking(work, rules, schedule, pp, chunks)
    looking.run()
    return np.concatenate([looking.even, looking.found()])


class _Looking:
    def __init__(self, work: Work, rules: Cutting, schedule: str, pp: int, chunks: int) -> None:
        self.rules, self.schedule, self.pp, self.chunks = rules, schedule, pp, chunks
        self.work, self.parts = work, pp * chunks
        self.turns, self.divided = schedule in V_SHAPED, schedule in DIVIDED
        tables = work.forward, work.backward, work.weights, work.end
        self.forward, self.backward, self.weights, self.end = map(sums_before, tables)
        self.even = self._balanced(legal_cuts(rules, pp, chunks, self.turns))
        # Cuts that were simulated, and what they take.
        self.edges, self.seconds = np.zeros((0, self.parts + 1), np.int64), np.zeros(0)
        self.seen = np.zeros(0, np.int64)
        kinds = 3 if self.divided else 2
        actions = ACTIONS * LONG // max(LONG, len(rules))
        self.left = actions // (self.parts * work.microbatches * kinds)
        self.at_once, self.half = min(AT_ONCE, self.left // 4), self.left // 2

    @property
    def best(self) -> float:
        return float(self.seconds.min(initial=np.inf))

    def run(self) -> None:
        """Look until nothing better is found, or enough was simulated."""
        shares = self._legal(at_shares(self.work.share, self.rules, self.parts))
        if self.left < FEWEST:
            self.edges, self.seconds = shares, np.zeros(len(shares))
            return
        self._look_at(np.concatenate([shares, self.even]))
        if not len(self.edges):
            return
        at = places(self.rules)
        self._renew(at)
        for _ in range(MOST_AROUND):
            best = self.best
            self._look_at(self._legal(neighbours(self.edges[self._order()[0]], at)))
            if self.best >= best or self.left <= 0:
                break

    def _renew(self, at: Ints) -> None:
        """Let the best have children, as long as these are better."""
        draw, idle = np.random.default_rng(0), 0
        count = FEW_CHILDREN if self.work.alike else CHILDREN
        for _ in range(ROUNDS):
            best, chosen = self.best, self._order()[:POPULATION]
            weights = np.arange(1.0, len(chosen) + 1) ** -0.7
            born = children(self.edges[chosen], count, weights, at, draw)
            self._look_at(self._legal(born))
            idle = idle + 1 if self.best > best * (1 - GAIN) else 0
            # Of alike blocks there is little to find.
            enough = self.work.alike or self.left <= self.half
            if idle == IDLE or self.left <= 0 or (idle and enough):
                break

    def _order(self) -> Ints:
        """The cuts, best first."""
        return np.argsort(self.seconds, kind="stable")

    def found(self) -> Ints:
        """What is near the best, best first."""
        near = np.flatnonzero(self.seconds <= self.best * (1 + NEAR))
        order = np.lexsort((*self.edges[near].T[::-1], self.seconds[near]))
        return np.asarray(self.edges[near[order[:MOST_KEPT]]])

    def _legal(self, edges: Ints) -> Ints:
        return legal(edges, self.rules, self.pp, turns=self.turns) if len(edges) else edges

    def _balanced(self, edges: Ints) -> Ints:
        """At most `MOST_EVEN` of some cuts: those that can take the least."""
        if len(edges) <= MOST_EVEN:
            return edges
        least, _ = self._least(edges, *self._seconds(edges)[:2])
        return np.asarray(edges[np.sort(np.argsort(least, kind="stable")[:MOST_EVEN])])

    def _look_at(self, edges: Ints) -> None:
        """Simulate those that are new and may be near the best, as long as it is worth it."""
        forward, backward, weights = self._seconds(edges)
        least, ends = self._least(edges, forward, backward)
        order = self._new(edges, least)
        if not len(order):
            return
        self.left -= len(order)
        more = weights[order].T if self.divided else None
        given = self.work.microbatches, self.schedule, self.chunks, more
        seconds = seconds_of_many(forward[order].T, backward[order].T, *given) + ends[order]
        self.edges = np.concatenate([self.edges, edges[order]])
        self.seconds = np.concatenate([self.seconds, seconds])

    def _least(self, edges: Ints, forward: Floats, backward: Floats) -> tuple[Floats, Floats]:
        """[candidates]: what they take at least (as `times.least_busy`), and the end of a step."""
        given = self.pp, self.work.microbatches
        busy = busy_at_least(forward + backward, *given, turns=self.turns)
        ends = by_rank(between(self.end, edges), self.pp, turns=self.turns).max(axis=1, initial=0)
        return np.asarray(busy.max(axis=1, initial=0) + ends), ends.astype(float)

    def _new(self, edges: Ints, least: Floats) -> Ints:
        """Of those that take `least` and may be near the best the first that are not known."""
        chosen = np.flatnonzero(least < self.best * (1 + WORTH))
        chosen = chosen[np.argsort(least[chosen], kind="stable")]
        chosen = chosen[distinct(edges[chosen])]
        keys = numbers(edges[chosen])
        new = np.flatnonzero(~np.isin(keys, self.seen))[: min(self.at_once, self.left)]
        self.seen = np.concatenate([self.seen, keys[new]])
        return np.asarray(chosen[new])

    def _seconds(self, edges: Ints) -> tuple[Floats, Floats, Floats]:
        """[candidates, parts]: forward, backward, and what of that is for weights."""
        leaving = self.work.send[edges[:, 1:] - 1]
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
