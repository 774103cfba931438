"""Seconds of the parts of a zero-bubble pipeline, and what no order of theirs can undercut.

Rank r can't begin before the first micro-batch has gone forward through the first parts of the
ranks before it, and then works through all of its parts for each micro-batch. And one micro-batch
goes through all parts forward, and back without the gradients of weights:

    makespan >= max over r of  sum of f[i] for i < r  +  m * (t[r] + t[r + p] + ...)
    makespan >= sum of all f + b

with f the forward of a part, b the first half of its backward, and t all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.cost.setting import Setting
from autopar.search.chain import Chain, Floats, Ints
from autopar.search.interleaved.times import ChunkTimes, forward_seconds, over_ranks, sums


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
        ahead = np.cumsum(self.forward[:, :pp], axis=1) - self.forward[:, :pp]
        busy = ahead + microbatches * over_ranks(self.forward + self.backward, pp)
        through = (self.forward + self.backward - self.weights).sum(axis=1)
        return np.asarray(np.maximum(busy.max(axis=1), through))


def least_busy(parts: Floats, pp: int, microbatches: int) -> Floats:
    """[candidates]: a bound where only the sum of all that a part does is known."""
    return np.asarray(microbatches * over_ranks(parts, pp).max(axis=1))
