"""Seconds of the parts of a zero-bubble pipeline, and what no order of theirs can undercut.

Rank r begins when the first micro-batch has gone forward through the first parts of the ranks
before it. It starts its first backward when it has warmed up, and the rank behind it has ended its
own first half of that micro-batch; by then it has done nothing but its warm-up:

    start[r] = max(ahead[r] + warm_up[r], start[r + 1] + i[r + 1] of the last chunk)

and behind the last rank no micro-batch is before it has gone forward through all parts. All else
that rank r does for m micro-batches comes after that. What it does last are the second halves of
r + 1 backwards of its first part; before these its last first half goes on to the first part of the
chain, whose whole backward is a second half:

    makespan >= max over r of  start[r] - warm_up[r] + m (t[r] + t[r + p] + ...)
                               + max(0, i[r - 1] + ... + i[1] + w[0] - (r + 1) w[r])
    makespan >= sum of all f + i, and w[0]

with f the forward of a part, i and w the halves of its backward, and t all of it. For even parts
and f >= i the first is m T + (p - 1) f, which is what the schedule takes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.cost.setting import Setting
from autopar.interleaving import round_size
from autopar.search.chain import Chain, Floats, Ints
from autopar.search.interleaved.times import (
    ChunkTimes,
    forward_seconds,
    over_ranks,
    ranks_ahead,
    sums,
)


@dataclass(frozen=True)
class PartSeconds:
    """[candidates, parts]: `forward`, `backward`, and of the latter what is done for `weights`."""

    forward: Floats
    backward: Floats
    weights: Floats

    @staticmethod
    def of(chain: Chain, setting: Setting, times: ChunkTimes, edges: Ints) -> PartSeconds:
        ahead = forward_seconds(chain, setting)
        forward = sums(ahead, edges) + times.exit[edges[:, 1:] - 1]
        backward = sums(times.kept - ahead, edges) + times.entry[edges[:, :-1]]
        own = np.array([b.backward_weights for b in chain.distinct], np.float64)[chain.which]
        weights = sums(own, edges)
        weights[:, 0] = backward[:, 0]  # the first part has no first half
        return PartSeconds(forward, backward, weights)

    def least(self, pp: int, microbatches: int) -> Floats:
        """[candidates]: the lower bound of the module's text."""
        first_half = self.backward - self.weights
        warm_up = self._warm_up(pp, microbatches)
        start = ranks_ahead(self.forward, pp) + warm_up
        start[:, -1] = np.maximum(start[:, -1], self.forward.sum(axis=1))
        for rank in reversed(range(pp - 1)):
            behind = start[:, rank + 1] + first_half[:, rank + 1 - pp]
            start[:, rank] = np.maximum(start[:, rank], behind)
        busy = start - warm_up + microbatches * over_ranks(self.forward + self.backward, pp)
        through = (self.forward + first_half).sum(axis=1) + self.weights[:, 0]
        drained = busy + self._drain(first_half, pp, microbatches)
        return np.asarray(np.maximum(drained.max(axis=1), through))

    def _warm_up(self, pp: int, microbatches: int) -> Floats:
        """[candidates, ranks]: forwards before the first backward (`pipeline.zero_bubble_order`):
        a round through all chunks but the last, and there one for each rank from this one on."""
        size = round_size(pp, microbatches)
        last = np.minimum(pp - np.arange(pp), size)
        found = size * over_ranks(self.forward[:, :-pp], pp)
        return np.asarray(found + last * self.forward[:, -pp:])

    def _drain(self, first_half: Floats, pp: int, microbatches: int) -> Floats:
        """[candidates, ranks]: seconds from the end of a rank until that of the first one."""
        back = ranks_ahead(first_half, pp) + self.weights[:, :1]
        kept = np.arange(1, pp + 1)
        left = np.maximum(back - kept * self.weights[:, :pp], 0.0)
        # Of a shorter round what is kept to the end is not of the first part alone.
        return np.where(kept <= round_size(pp, microbatches), left, 0.0)


def least_seconds(forward: Floats, parts: Floats, pp: int, microbatches: int) -> Floats:
    """[candidates]: a bound where only the sum of all that a part does is known, and seconds that
    its `forward` takes at least."""
    return np.asarray((ranks_ahead(forward, pp) + microbatches * over_ranks(parts, pp)).max(axis=1))
