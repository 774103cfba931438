"""Seconds of the parts of an interleaved pipeline, and what no order of theirs can undercut.

Rank r can't begin before the first micro-batch has gone through the first parts of the ranks before
it, nor end before the last one has come back through them; in between it works through all of its
parts for each micro-batch. And one micro-batch goes through all parts, there and back:

    makespan >= max over r of  sum of t[i] for i < r  +  m * (t[r] + t[r + p] + ...)
    makespan >= sum of all t

with t the forward and backward of a part, sends included. For even parts and no sends the first
equals the schedule: (m + (p - 1) / v) T.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.block_cost import tie_groups
from autopar.cost.setting import Setting
from autopar.cost.step import BlockTimes, block_times, dp_collectives, exposed_gather, tied_seconds
from autopar.search.any_chunks import AnyChunks
from autopar.search.chain import Chain, Floats, Ints, Number, sums_before


@dataclass(frozen=True)
class ChunkTimes:
    """Per block. `kept`, `end`, `end_first`, `extra`: as in `BlockTimes`; `entry` / `exit`: what is
    added where a part begins / ends, in gathers and sends; `tied`: of each
    group of tied parameters, 1 where their gradients are summed over stages, and the seconds."""

    kept: Floats
    entry: Floats
    first: Floats
    exit: Floats
    end: Floats
    end_first: Floats
    extra: Floats
    tied: tuple[tuple[Ints, float], ...]

    @staticmethod
    def of(chain: Chain, times: Sequence[BlockTimes], setting: Setting) -> ChunkTimes:
        """`times`: those of `chain.distinct`."""
        send = chain.seconds(times, lambda t: t.send)
        out = send.copy()
        out[-1] = 0.0
        first = chain.seconds(times, lambda t: t.first_gather)
        return ChunkTimes(
            kept=chain.seconds(times, lambda t: t.kept),
            entry=first + np.concatenate([[0.0], send[:-1]]),
            first=first,
            exit=out,
            end=chain.seconds(times, lambda t: t.end_dp + t.end_tp + t.end_optimizer),
            end_first=chain.seconds(times, lambda t: t.end_first),
            extra=chain.seconds(times, lambda t: t.extra) * chain.ints(lambda b: bool(b.options)),
            tied=tuple(
                (
                    chain.tied(group, lambda t: 1 if t.trainable else 0),
                    tied_seconds(chain.blocks, group, setting),
                )
                for group in tie_groups(chain.blocks)
            ),
        )

    @cached_property
    def _kept(self) -> Floats:
        return sums_before(self.kept)

    @cached_property
    def _end(self) -> Floats:
        return sums_before(self.end)

    def parts(self, edges: Ints, setting: Setting, *, full: bool = False) -> Floats:
        """[candidates, parts]: forward and backward of one micro-batch; `full`: with all blocks
        recomputed that can be."""
        before = sums_before(self.kept + self.extra) if full else self._kept
        # What is added where parts begin and end goes with the sums before their edges.
        left, begun = before[1:] + self.exit, before[:-1] - self.entry
        found = left.take(edges[:, 1:] - 1)
        found -= begun.take(edges[:, :-1])
        for part in setting.turns:
            edge = edges[:, part + 1]
            found[:, part] -= self.exit[edge - 1]
            found[:, part + 1] -= self.entry[edge] - self.first[edge]
        return found

    def entering(self, edges: Ints, setting: Setting) -> Floats:
        """[candidates, parts]: what is added where parts begin."""
        found = self.entry.take(edges[:, :-1])
        for part in setting.turns:
            found[:, part + 1] = self.first[edges[:, part + 1]]
        return found

    def leaving(self, edges: Ints, setting: Setting) -> Floats:
        """[candidates, parts]: what is added where parts end."""
        found = self.exit.take(edges[:, 1:] - 1)
        found[:, setting.turns] = 0.0
        return found

    def ends(self, edges: Ints, setting: Setting) -> Floats:
        """[candidates]: the longest end of a step over the ranks."""
        pp = setting.mesh.pp
        by_rank = over_ranks(between(self._end, edges), setting) + self.end_first[edges[:, :pp]]
        for holds, seconds in self.tied:
            count = over_ranks(sums(holds.astype(np.float64), edges), setting)
            by_rank += np.where((count > 0) & (count < holds.sum()), seconds, 0.0)
        return np.asarray(by_rank.max(axis=1))


@lru_cache(maxsize=2048)
def chunk_times(chain: Chain, key: AnyChunks) -> ChunkTimes:
    """Those of a chain under a setting, whatever its number of chunks."""
    times = [block_times(b, key.setting) for b in chain.distinct]
    return ChunkTimes.of(chain, times, key.setting)


def sums(values: NDArray[Number], edges: Ints) -> NDArray[Number]:
    """[candidates, parts]: sums of per-block values over parts."""
    return between(sums_before(values), edges)


def between(total: NDArray[Number], edges: Ints) -> NDArray[Number]:
    """[candidates, parts]: `sums` of the values whose `before` is `total`."""
    found = total.take(edges)
    return np.asarray(found[:, 1:] - found[:, :-1])


def over_ranks(parts: Floats, setting: Setting) -> Floats:
    """[candidates, ranks]: sums over the parts of each rank."""
    return by_rank(parts, setting.mesh.pp, turns=bool(setting.turns))


def by_rank(parts: NDArray[Number], pp: int, *, turns: bool) -> NDArray[Number]:
    """`over_ranks`; `turns`: the parts make a V."""
    if turns:
        return np.asarray(parts[:, :pp] + parts[:, : pp - 1 : -1])
    return np.asarray(parts.reshape(len(parts), parts.shape[1] // pp, pp).sum(axis=1))


def ranks_ahead(parts: Floats, pp: int) -> Floats:
    """[candidates, ranks]: sums over the first parts of the ranks before each one."""
    return np.asarray(np.cumsum(parts[:, :pp], axis=1) - parts[:, :pp])


def least_makespan(parts: Floats, setting: Setting) -> Floats:
    """[candidates]: the lower bound of the module's text."""
    busy = least_busy(parts, setting)
    return np.asarray(np.maximum(busy.max(axis=1), parts.sum(axis=1)))


def least_busy(parts: Floats, setting: Setting) -> Floats:
    """[candidates, ranks]: seconds from the start of a step to the end of a rank, at least."""
    turns = bool(setting.turns)
    return busy_at_least(parts, setting.mesh.pp, setting.microbatches, turns=turns)


def busy_at_least(parts: Floats, pp: int, microbatches: int, *, turns: bool) -> Floats:
    """`least_busy`; `turns`: the parts make a V."""
    return np.asarray(ranks_ahead(parts, pp) + microbatches * by_rank(parts, pp, turns=turns))


def forward_seconds(chain: Chain, setting: Setting) -> Floats:
    """[blocks]: the share of `kept` that falls in the forward."""
    found = []
    for block in chain.distinct:
        seconds = block.forward + setting.practice.block_seconds
        if setting.zero == 3 and setting.mesh.replicas > 1:
            gather, _ = dp_collectives(block, setting)
            seconds += exposed_gather(gather, block.forward, setting)
        found.append(seconds)
    return np.asarray(np.array(found, np.float64)[chain.which])
