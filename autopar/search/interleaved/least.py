"""Bytes that no recomputation can do without, from prices that may be lower bounds themselves.

When a backward starts, a rank holds the states of its chunks, the gradients of those that had a
backward before, of every micro-batch alive what its blocks keep at least and what a chunk sends,
and what the last block of the working chunk works with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autopar.block_cost import tie_groups
from autopar.cost import memory
from autopar.cost.block_moment import gathered_bytes, inside_bytes
from autopar.cost.setting import Setting
from autopar.search.chain import Chain, Ints
from autopar.search.interleaved.phases import Phases, phases
from autopar.search.interleaved.times import sums

if TYPE_CHECKING:
    from autopar.search.zero_bubble.phases import HalfPhases


class LeastBytes:
    """Lower bounds of one setting; all terms grow with the bytes of blocks."""

    def __init__(self, chain: Chain, setting: Setting) -> None:
        self.pp = setting.mesh.pp
        self.phases: Sequence[Phases | HalfPhases] = phases(
            self.pp, setting.microbatches, setting.chunks
        )
        groups = tie_groups(chain.blocks)
        self.states = chain.ints(lambda b: memory.state_bytes(b, setting))
        self.gradients = chain.ints(lambda b: memory.gradient_bytes(b, setting))
        # A part holds a tied parameter once, whether one or more of its blocks use it.
        self.tied = [
            chain.tied(group, lambda t: memory.state_bytes(t, setting)) for group in groups
        ]
        self.tied_gradients = [
            chain.tied(group, lambda t: memory.gradient_bytes(t, setting)) for group in groups
        ]
        self.kept = chain.ints(lambda b: b.least_kept)
        self.sent = chain.ints(lambda b: b.boundary_bytes)
        self.sent[-1] = 0
        self.working = chain.ints(
            lambda b: inside_bytes(b) + gathered_bytes(b, setting, rooted=groups)
        )

    def fit(self, edges: Ints, limit: float) -> NDArray[np.bool_]:
        """[candidates]: the fullest rank may have no more than `limit` bytes."""
        states = self._once(self.states, self.tied, edges)
        gradients = self._once(self.gradients, self.tied_gradients, edges)
        last = edges[:, 1:] - 1
        kept = sums(self.kept, edges) + self.sent[last]
        working = self.working[last]
        left = np.arange(len(edges))
        for rank, found in enumerate(self.phases):
            if not len(left):
                break
            here = left, slice(rank, None, self.pp)
            total = kept[here] @ found.live.T + gradients[here] @ found.before.T
            total = (total + working[here][:, found.chunk]).max(axis=1)
            left = left[states[here].sum(axis=1) + total <= limit]
        fits = np.zeros(len(edges), bool)
        fits[left] = True
        return fits

    def _once(self, values: Ints, tied: list[Ints], edges: Ints) -> Ints:
        """[candidates, parts]: sums of `values` with what is tied in a part counted once."""
        found = sums(values, edges)
        for same in tied:
            if same.any():
                held = sums(same, edges)
                found = found - held + np.where(held > 0, same[same > 0].min(), 0)
        return np.asarray(found)
