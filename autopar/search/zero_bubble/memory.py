"""Bytes of the ranks of a zero-bubble pipeline, for many candidate cuts at once.

A rank holds its chunks as `autopar.cost.divided_moment` says: while a half works in chunk c,

    sum of fixed_i + sum of live_i flight_i + sum of delayed_i waiting_i
    + gradients of chunks that had a second half before + the fullest moment of the half in c

in the terms of `autopar.search.moment_tables`, and the end of a step takes the sum of scratch_i.
(Where a V turns, flight of the second part is without its input, which the first one has sent.)
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autopar.cost.divided_moment import first_half_bytes, given_up_bytes, second_half_bytes
from autopar.cost.setting import Setting
from autopar.interleaving import waiting
from autopar.search.chain import NONE, Chain, Ints, interval_sum, running_max
from autopar.search.interleaved.least import LeastBytes
from autopar.search.interleaved.memory import LARGEST_TABLE
from autopar.search.interleaved.rank_kinds import RankKinds
from autopar.search.interleaved.times import between
from autopar.search.moment_tables import interval_moments
from autopar.search.zero_bubble.phases import HalfPhases, half_phases


class LeastDividedBytes(LeastBytes):
    """Lower bounds of one setting, from prices that may be lower bounds themselves: the states,
    what blocks keep (nothing is recomputed), and gradients that were made before."""

    def phases(self) -> Iterator[HalfPhases]:
        return half_phases(self.setting)

    def kept(self, edges: Ints) -> Ints:
        return between(self.terms.saved, edges)

    def working(self, last: Ints) -> Ints:
        return np.zeros_like(last)


class DividedMemory:
    """Memory of one setting."""

    def __init__(self, chain: Chain, setting: Setting) -> None:
        self.pp, self.chunks, self.turns = setting.mesh.pp, setting.chunks, setting.turns
        self.tables = interval_moments(chain, setting)
        self.phases = tuple(half_phases(setting))
        self.early = waiting(setting.schedule, self.pp, setting.microbatches)
        self.practice = setting.practice
        # By its end: what a part gives back between the halves.
        loose = chain.ints(lambda b: b.loose_bytes)
        self.loose = np.concatenate([np.zeros(1, np.int64), loose])
        self.waiting = interval_sum(chain.ints(lambda b: b.delayed_bytes)) - self.loose[None, :]
        self.first_half = self._first_half(chain)
        self.second_half = {
            first: self._second_half(chain, setting, first=first) for first in (True, False)
        }
        batch = max(1, LARGEST_TABLE // max(len(p.chunk) for p in self.phases))
        self.kinds = RankKinds(chain, self.tables, setting, batch)

    def _first_half(self, chain: Chain) -> Ints:
        """[a, b]: of a part that is not the first one."""
        # Behind block j of a part that ends before b there wait those of blocks j + 1 .. b - 1.
        behind = np.cumsum(chain.ints(lambda b: b.delayed_bytes))
        at = chain.ints(first_half_bytes) - behind
        total = np.concatenate([np.zeros(1, np.int64), behind])
        return np.asarray(self._largest(at, self.tables.sent) + total[None, :])

    def _second_half(self, chain: Chain, setting: Setting, *, first: bool) -> Ints:
        gone = np.cumsum(chain.ints(lambda b: given_up_bytes(b, setting, first=first)))
        at = chain.ints(lambda b: second_half_bytes(b, setting, first=first)) + gone
        total = np.concatenate([np.zeros(1, np.int64), gone])
        return np.asarray(self._largest(at, self.loose) - total[None, :])

    def _largest(self, at: Ints, more: Ints) -> Ints:
        """[a, b]: the most of `at` over the blocks of a part, with `more` (by its end) for all but
        the last, and what it received."""
        earlier = np.full((len(at), len(at) + 1), NONE, np.int64)
        earlier[:, 1:] = running_max(at)[:, :-1] + more[None, 1:]
        last = np.concatenate([np.zeros(1, np.int64), at])
        return np.asarray(np.maximum(earlier, last[None, :]) + self.tables.received[:, None])

    def peaks(self, edges: Ints) -> Ints:
        """[candidates, ranks]: bytes of the fullest moment."""
        return self.kinds.of_ranks(edges, self._of_rank)

    def _of_rank(self, rank: int, edges: Ints) -> Ints:
        """[candidates]."""
        tables, phases = self.tables, self.phases[rank]
        at = self.kinds.spans(rank, edges)
        flight, gradients, waits = tables.flight[at], tables.gradients[at], self.waiting[at]
        if rank == 0:
            waits[:, 0] = tables.sent[at[1][:, 0]]
        constant = tables.fixed[at].sum(axis=1) + self.early * tables.received[at[0]].max(axis=1)
        constant = constant - (self.chunks - 1) * self.practice.bucket_bytes
        ready = phases.before | bool(self.practice.gradient_buffer)
        if rank in self.turns:
            flight[:, 1] = flight[:, 1] - tables.sent[at[1][:, 0]]
            waits[:, 1] = waits[:, 1] + tables.sent[at[1][:, 0]]
        total = constant[:, None] + flight @ phases.live.T + waits @ phases.delayed.T
        total = total + gradients @ ready.T - tables.given_back[at] @ phases.done.T
        working = self._working(phases, at)
        if rank == 0:
            self._whole(phases, at, working)
        total = (total + working).max(axis=1)
        return np.asarray(np.maximum(total, tables.scratch[at].sum(axis=1)))

    def _working(self, phases: HalfPhases, at: tuple[Ints, Ints]) -> Ints:
        """[candidates, halves]: what the working chunk has at its fullest moment besides."""
        start, stop = at[0][:, phases.chunk], at[1][:, phases.chunk]
        later = np.where(
            phases.first[None, :],
            self.second_half[True][start, stop],
            self.second_half[False][start, stop],
        )
        return np.where(phases.second[None, :], later, self.first_half[start, stop])

    def _whole(self, phases: HalfPhases, at: tuple[Ints, Ints], working: Ints) -> None:
        """The first part of the chain does its whole backward in the second half."""
        tables, here = self.tables, (at[0][:, 0], at[1][:, 0])
        working[:, (phases.chunk == 0) & ~phases.second] = 0
        for first in (True, False):
            mine = (phases.chunk == 0) & phases.second & (phases.first == first)
            if mine.any():
                moments = tables.of(first=first)
                most = np.minimum(moments.floor[here], moments.plain[here] - tables.flight[here])
                if not first or self.practice.gradient_buffer:
                    most = most - tables.gradients[here]
                working[:, mine] = (most - tables.sent[here[1]])[:, None]
