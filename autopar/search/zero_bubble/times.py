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

V-shaped pipelines (`zbv`) are bounded likewise: a micro-batch has gone forward through all parts
before it comes back through the second parts of the ranks, from the first rank on; rank r warms up
with 2 p - 1 - r forwards of its first part and r + 1 of its second one, and what it does last are
the second halves of r + 1 backwards of the first and r of the second part.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

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
        forward = sums(ahead, edges) + times.leaving(edges, setting)
        backward = sums(times.kept - ahead, edges) + times.entering(edges, setting)
        own = np.array([b.backward_weights for b in chain.distinct], np.float64)[chain.which]
        whole = np.array([b.backward_compute for b in chain.distinct], np.float64)[chain.which]
        more = setting.cluster.device.divided_slowdown * sums(whole, edges)
        more[:, 0] = 0.0  # the first part has no first half
        weights = sums(own, edges) + more
        backward = backward + more
        weights[:, 0] = backward[:, 0]
        return PartSeconds(forward, backward, weights)

    def least(self, setting: Setting) -> Floats:
        """[candidates]: the lower bound of the module's text."""
        first_half = self.backward - self.weights
        warm_up = self._warm_up(setting)
        start = ranks_ahead(self.forward, setting.mesh.pp) + warm_up
        self._wait_for_first(start, first_half, setting)
        busy = start - warm_up
        busy += setting.microbatches * over_ranks(self.forward + self.backward, setting)
        through = (self.forward + first_half).sum(axis=1) + self.weights[:, 0]
        drained = busy + self._drain(first_half, setting)
        return np.asarray(np.maximum(drained.max(axis=1), through))

    def _warm_up(self, setting: Setting) -> Floats:
        """[candidates, ranks]: forwards before the first backward (`pipeline.zero_bubble_order`):
        a round through all chunks but the last, and there one for each rank from this one on."""
        pp, m = setting.mesh.pp, setting.microbatches
        first, last = self.forward[:, :pp], self.forward[:, -pp:]
        if setting.turns:
            there = np.minimum(2 * pp - 1 - np.arange(pp), m)
            back = np.minimum(1 + np.arange(pp), m)
            return np.asarray(there * first + back * last[:, ::-1])
        size = round_size(pp, m)
        found = size * over_ranks(self.forward[:, :-pp], setting)
        return np.asarray(found + np.minimum(pp - np.arange(pp), size) * last)

    def _wait_for_first(self, start: Floats, first_half: Floats, setting: Setting) -> None:
        """Put off the `start` of each rank's first backward until its micro-batch has come back."""
        ranks, through = list(range(setting.mesh.pp)), self.forward.sum(axis=1)
        # From the rank of the last part on.
        order = ranks if setting.turns else ranks[::-1]
        start[:, order[0]] = np.maximum(start[:, order[0]], through)
        for before, rank in pairwise(order):
            last = setting.parts_of(before)[-1]
            behind = start[:, before] + first_half[:, last]
            start[:, rank] = np.maximum(start[:, rank], behind)

    def _drain(self, first_half: Floats, setting: Setting) -> Floats:
        """[candidates, ranks]: seconds from the end of a rank until that of the first one."""
        pp, m = setting.mesh.pp, setting.microbatches
        back = ranks_ahead(first_half, pp) + self.weights[:, :1]
        kept = np.arange(1, pp + 1)
        own = kept * self.weights[:, :pp]
        if setting.turns:
            own = own + np.arange(pp) * self.weights[:, : pp - 1 : -1]
        # Of fewer micro-batches, or a shorter round, other parts are kept to the end.
        told = m >= 2 * pp - 1 if setting.turns else kept <= round_size(pp, m)
        return np.where(told, np.maximum(back - own, 0.0), 0.0)


def least_seconds(forward: Floats, parts: Floats, setting: Setting) -> Floats:
    """[candidates]: a bound where only the sum of all that a part does is known, and seconds that
    its `forward` takes at least."""
    ahead = ranks_ahead(forward, setting.mesh.pp)
    return np.asarray((ahead + setting.microbatches * over_ranks(parts, setting)).max(axis=1))
