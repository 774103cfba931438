"""Bytes of the blocks of a chain, added up over the parts that each pipeline rank holds.

By the model of `autopar.cost.memory`: a rank holds its parts as one stage holds its blocks. All
but the activations, which `chunk_memory` counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.block_cost import BlockCost, tie_groups
from autopar.cost import memory
from autopar.cost.setting import Setting
from autopar.search.chain import Chain, Ints
from autopar.search.chunk_times import over_ranks, sums
from autopar.search.ranges import RangeMaximum


class BlockBytes:
    """What is the same for every number of chunks. `saved`: kept per micro-batch without
    recomputation, `gain`: freed by it, `rebuilt`: made again in the backward."""

    def __init__(self, chain: Chain, setting: Setting) -> None:
        def of(term: Callable[[BlockCost, Setting], int]) -> Ints:
            return chain.ints(lambda b: term(b, setting))

        self.saved = chain.ints(lambda b: b.saved_bytes)
        self.gain = self.saved - chain.ints(lambda b: b.input_bytes)
        self.rebuilt = of(lambda b, s: memory.rebuilt_bytes(b, b.saved_bytes, s))
        boundary = chain.ints(lambda b: b.boundary_bytes)
        self._received, self._sent = np.concatenate([[0], boundary[:-1]]), boundary.copy()
        self._sent[-1] = 0
        terms = (
            _Term.of(chain, setting, memory.parameter_bytes, "parameters"),
            _Term.of(chain, setting, memory.optimizer_bytes, "trainable"),
            _Term.of(chain, setting, memory.gradient_bytes, "trainable"),
        )
        scratch = _Term.of(chain, setting, memory.scratch_bytes, "trainable")
        self._states = _Term.sum(terms)
        self._end = _Term.sum((*terms, scratch))
        gathered = of(memory.gathered_bytes)
        self._gathered = RangeMaximum(gathered) if gathered.any() else None
        tied = [
            chain.tied(group, lambda t: memory.tied_gathered_bytes(t.parameters, setting))
            for group in tie_groups(chain.blocks)
        ]
        self._tied = [RangeMaximum(group) for group in tied if group.any()]
        self._working = RangeMaximum(of(memory.working_bytes))
        followed = of(memory.followed_bytes)
        self._followed = RangeMaximum(followed) if followed.any() else None

    def crossing(self, edges: Ints) -> Ints:
        """[candidates, parts]: what a micro-batch receives and sends."""
        return np.asarray(self._received[edges[:, :-1]] + self._sent[edges[:, 1:] - 1])

    def fixed(self, edges: Ints, pp: int, passing: int) -> tuple[Ints, Ints]:
        """[candidates, ranks]: all but activations in a backward, and all at the step's end.
        `passing`: how many times the largest crossing is under way."""
        start, stop = edges[:, :-1], edges[:, 1:]

        def largest(values: Ints) -> Ints:
            return np.asarray(values.reshape(len(edges), -1, pp).max(axis=1))

        gathered: Ints | int = 0
        if self._gathered is not None:
            first, second = self._gathered(start, stop), self._gathered.second(start, stop)
            both = np.concatenate([first, second], axis=1).reshape(len(edges), -1, pp)
            gathered = np.sort(both, axis=1)[:, -2:].sum(axis=1)
        for tied in self._tied:
            gathered = gathered + largest(tied(start, stop))
        buffers = largest(self._working(start, stop)) + passing * largest(self.crossing(edges))
        if self._followed is not None:
            # All but the very first block of a rank have one before them that works meanwhile.
            behind = start.copy()
            behind[:, :pp] += 1
            buffers = buffers + largest(self._followed(behind, stop))
        states = self._states.held(edges, pp) + gathered
        return states + buffers, self._end.held(edges, pp) + gathered


@dataclass(frozen=True)
class _Term:
    """Bytes of every block, and those of its tied parameters among them by group: a rank holds a
    tied parameter once."""

    each: Ints
    same: tuple[Ints, ...]

    @staticmethod
    def of(
        chain: Chain, setting: Setting, term: Callable[[int, Setting], int], field: str
    ) -> _Term:
        return _Term(
            chain.ints(lambda b: term(getattr(b, field), setting)),
            tuple(
                chain.tied(group, lambda t: term(getattr(t, field), setting))
                for group in tie_groups(chain.blocks)
            ),
        )

    @staticmethod
    def sum(terms: tuple[_Term, ...]) -> _Term:
        same = zip(*(t.same for t in terms), strict=True)
        return _Term(
            np.asarray(sum(t.each for t in terms)), tuple(np.asarray(sum(s)) for s in same)
        )

    def held(self, edges: Ints, pp: int) -> Ints:
        """[candidates, ranks]."""
        once = over_ranks(sums(self.each, edges), pp).astype(np.int64)
        start, stop = edges[:, :-1], edges[:, 1:]
        for same in self.same:
            most = RangeMaximum(same)(start, stop).reshape(len(edges), -1, pp).max(axis=1)
            once = once - over_ranks(sums(same, edges), pp).astype(np.int64) + most
        return once
