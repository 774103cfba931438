"""Bytes that no recomputation can do without, from prices that may be lower bounds themselves.

When a backward starts, a rank holds the states of its chunks, the gradients of those that had a
backward before, of every micro-batch alive what its blocks keep at least and what a chunk sends,
and what the last block of the working chunk works with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopar.block_cost import Held, tie_groups
from autopar.cost import memory
from autopar.cost.block_moment import gathered_bytes, given_back_bytes, inside_bytes
from autopar.cost.setting import Setting
from autopar.search.any_chunks import AnyChunks
from autopar.search.chain import Chain, Ints, sums_before
from autopar.search.interleaved.candidates import candidates
from autopar.search.interleaved.phases import Phases, phases
from autopar.search.interleaved.times import between

if TYPE_CHECKING:
    from autopar.search.zero_bubble.phases import HalfPhases


@dataclass(frozen=True)
class _Once:
    """Bytes of blocks, summed over those before each. A part holds tied parameters once, whether
    one or more of its blocks use them: `tied` has of each group the bytes, summed so too, and those
    of one holder."""

    total: Ints
    tied: tuple[tuple[Ints, int], ...]

    @staticmethod
    def of(chain: Chain, get: Callable[[Held], int]) -> _Once:
        found = [chain.tied(group, get) for group in tie_groups(chain.blocks)]
        tied = tuple((sums_before(same), int(same[same > 0].min())) for same in found if same.any())
        return _Once(sums_before(chain.ints(get)), tied)

    def parts(self, edges: Ints) -> Ints:
        """[candidates, parts]."""
        found = between(self.total, edges)
        for same, one in self.tied:
            held = between(same, edges)
            found = found - held + np.where(held > 0, one, 0)
        return np.asarray(found)


@dataclass(frozen=True)
class LeastTerms:
    """Of blocks: the states, the gradients, and what of both is `given_back` by the last backward;
    what is kept of a micro-batch, recomputed (`kept`) or
    not (`saved`), summed over the blocks before each; what is sent behind it; and what works in a
    backward besides."""

    states: _Once
    gradients: _Once
    given_back: Ints
    kept: Ints
    saved: Ints
    sent: Ints
    working: Ints


@lru_cache(maxsize=256)
def _least_terms(chain: Chain, key: AnyChunks) -> LeastTerms:
    setting, groups = key.setting, tie_groups(chain.blocks)
    sent = chain.ints(lambda b: b.boundary_bytes)
    sent[-1] = 0
    return LeastTerms(
        _Once.of(chain, lambda b: memory.state_bytes(b, setting)),
        _Once.of(chain, lambda b: memory.gradient_bytes(b, setting)),
        sums_before(chain.ints(lambda b: given_back_bytes(b, setting))),
        sums_before(chain.ints(lambda b: b.least_kept)),
        sums_before(chain.ints(lambda b: b.saved_bytes - b.loose_bytes)),
        sent,
        chain.ints(lambda b: inside_bytes(b) + gathered_bytes(b, setting, rooted=groups)),
    )


class LeastBytes:
    """Lower bounds of one setting; all terms grow with the bytes of blocks."""

    def __init__(self, chain: Chain, setting: Setting) -> None:
        self.pp, self.setting = setting.mesh.pp, setting
        # What is held does not depend on the order of actions.
        self.terms = _least_terms(chain, AnyChunks(replace(setting, schedule="interleaved")))

    def phases(self) -> Iterable[Phases | HalfPhases]:
        """Moments of every rank."""
        return phases(self.pp, self.setting.microbatches, self.setting.chunks)

    def kept(self, edges: Ints) -> Ints:
        """[candidates, parts]: bytes of a micro-batch alive."""
        return between(self.terms.kept, edges)

    def working(self, last: Ints) -> Ints:
        """[candidates, parts]: what the last block of a part works with."""
        return np.asarray(self.terms.working[last])

    def fit(self, edges: Ints, limit: float) -> NDArray[np.bool_]:
        """[candidates]: the fullest rank may have no more than `limit` bytes."""
        last = edges[:, 1:] - 1
        states, gradients = (t.parts(edges) for t in (self.terms.states, self.terms.gradients))
        given_back = between(self.terms.given_back, edges)
        kept, working = self.kept(edges) + self.terms.sent[last], self.working(last)
        left = np.arange(len(edges))
        for rank, found in enumerate(self.phases()):
            if not len(left):
                break
            here = np.ix_(left, np.array(self.setting.parts_of(rank)))
            total = kept[here] @ found.live.T + gradients[here] @ found.before.T
            total = total - given_back[here] @ found.done.T
            total = (total + working[here][:, found.chunk]).max(axis=1)
            left = left[states[here].sum(axis=1) + total <= limit]
        fits = np.zeros(len(edges), bool)
        fits[left] = True
        return fits


class Room:
    """Which of the legal cuts of one setting may fit in `limit` bytes; each is looked at once,
    however often it is asked for."""

    def __init__(self, least: LeastBytes, edges: Ints, limit: float) -> None:
        self._least, self._edges, self._limit = least, edges, limit
        self._known = np.full(len(edges), -1, np.int8)

    def __call__(self, some: Ints) -> Ints:
        """Of `some` candidates (by number) those that may."""
        new = some[self._known[some] < 0]
        if len(new):
            self._known[new] = self._least.fit(self._edges[new], self._limit)
        return some[self._known[some] > 0]


@lru_cache(maxsize=8192)
def room(
    least: type[LeastBytes],
    chain: Chain,
    key: AnyChunks,
    schedule: str,
    chunks: int,
    limit: float,
) -> Room:
    """That of a setting of so many `chunks`, by prices of bytes that may be lower bounds."""
    setting = replace(key.setting, schedule=schedule, chunks=chunks)
    return Room(least(chain, setting), candidates(chain, setting, None), limit)
