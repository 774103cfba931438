"""Bytes of the ranks of an interleaved pipeline, and the recomputation that makes them fit.

A rank holds its chunks as `autopar.cost.chunked_moment` says. With g_i the bytes that recomputation
frees of a micro-batch in chunk i, a backward of chunk c takes

    sum of fixed_i + sum of live_i (flight_i - g_i) + gradients of chunks that had a backward before
    + max(min(floor_c, plain_c - flight_c + g_c), again_c)

in the terms of `autopar.search.moment_tables`, and the end of a step takes the sum of scratch_i.

Of recomputation a family is searched, rank by rank: the steps of `recomputation` in their order,
up to the first block with which the rank fits. Ranks do not share memory, and going further takes
longer, so this is the best of the family.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.cost.setting import Setting
from autopar.interleaving import waiting
from autopar.search.chain import NONE, Chain, Floats, Ints, counts_before
from autopar.search.interleaved.phases import phases
from autopar.search.interleaved.rank_kinds import RankKinds
from autopar.search.interleaved.recomputation import Recomputation, Step
from autopar.search.moment_tables import interval_moments

# Numbers of a table that is worked on at a time.
LARGEST_TABLE = 2_000_000


@dataclass(frozen=True)
class Fitted:
    """What makes candidates fit. [candidates]: `where` among all that were asked for. [candidates,
    ranks]: bytes of the fullest moment (`peaks`), how many steps are taken whole (`steps`), and by
    how many blocks the next one (`more`). [candidates, parts]: seconds that it adds."""

    where: Ints
    peaks: Ints
    steps: Ints
    more: Ints
    extra: Floats


class ChunkMemory:
    """Memory of one setting."""

    def __init__(self, chain: Chain, setting: Setting, recompute: str) -> None:
        self.pp, self.chunks = setting.mesh.pp, setting.chunks
        self.microbatches = setting.microbatches
        self.which = chain.which
        self.tables = interval_moments(chain, setting)
        self.recomputation = Recomputation(chain, setting, recompute)
        self.phases = phases(self.pp, setting.microbatches, self.chunks)
        self.early = waiting(setting.schedule, self.pp, setting.microbatches)
        self.practice = setting.practice
        self.orders = [self.recomputation.in_order(p.most) for p in self.phases]
        self.before = counts_before(chain.which)
        widest = max(
            (len(order) + 1) * len(p.chunk)
            for order, p in zip(self.orders, self.phases, strict=True)
        )
        self.kinds = RankKinds(chain, self.tables, setting, max(1, LARGEST_TABLE // widest))

    def floors(self, edges: Ints) -> Ints:
        """[candidates]: the fullest rank has no less, whatever is recomputed."""
        return np.asarray(self._of_ranks(edges, _Rank.floor).max(axis=1))

    def with_recomputation(
        self, edges: Ints, limit: float, least: Floats, busy: Floats, cutoff: float
    ) -> Floats:
        """[candidates]: lower bounds that count the recomputation without which a rank doesn't fit;
        those above `cutoff` need not be the best ones known. `least`: [candidates] bounds without
        it; `busy`: [candidates, ranks] those that follow from what each rank does."""
        found = least.copy()
        for rank in range(self.pp):
            left = np.flatnonzero(found < cutoff)
            if not len(left):
                break
            first, kind = self.kinds.distinct(rank, edges[left])
            more = _Rank(self, rank, edges[left[first]]).least_extra(limit)[kind]
            found[left] = np.maximum(found[left], busy[left, rank] + self.microbatches * more)
        return found

    def least(self, edges: Ints) -> Ints:
        """[candidates]: the fewest bytes that the fullest rank can do with, of the family."""
        return np.asarray(self._of_ranks(edges, _Rank.least).max(axis=1))

    def _of_ranks(self, edges: Ints, of: Callable[[_Rank], Ints]) -> Ints:
        """[candidates, ranks]."""
        return self.kinds.of_ranks(edges, lambda rank, some: of(_Rank(self, rank, some)))

    def fit(self, edges: Ints, limit: float) -> Fitted:
        """The candidates [candidates, parts + 1] that fit in `limit` bytes with the least
        recomputation of the family."""
        where = np.arange(len(edges))
        shape = (len(edges), self.pp)
        peaks, steps, more = (np.zeros(shape, np.int64) for _ in range(3))
        extra = np.zeros((len(edges), self.pp * self.chunks))
        for rank in range(self.pp):
            if not len(where):
                break
            first, kind = self.kinds.distinct(rank, edges[where])
            found = _Rank(self, rank, edges[where[first]]).fit(limit)
            place = np.full(len(first), -1)
            place[found.fits] = np.arange(len(found.fits))
            fits = place[kind] >= 0
            where, at = where[fits], place[kind][fits]
            peaks[where, rank], steps[where, rank] = found.peaks[at], found.steps[at]
            more[where, rank] = found.more[at]
            extra[where, rank :: self.pp] = found.extra[at]
        return Fitted(where, peaks[where], steps[where], more[where], extra[where])

    def labels(self, edges: Ints, steps: Ints, more: Ints) -> dict[int, str]:
        """How each recomputed block of one candidate is, by its index in the chain."""
        found: dict[int, str] = {}
        for rank in range(self.pp):
            order = self.orders[rank]
            for number in range(min(int(steps[rank]) + 1, len(order))):
                chunk, step = order[number]
                part = chunk * self.pp + rank
                mine = np.arange(edges[part], edges[part + 1])
                mine = mine[self.which[mine] == step.sort]
                if number == steps[rank]:
                    mine = mine[: int(more[rank])]
                found.update(dict.fromkeys(mine.tolist(), step.way.label))
        return found


@dataclass(frozen=True)
class _RankFit:
    """Of one rank; `fits` tells which candidates the other fields are of. `extra`: [candidates,
    chunks]."""

    fits: Ints
    peaks: Ints
    steps: Ints
    more: Ints
    extra: Floats


class _Rank:
    """The chunks of one rank in many candidates: tables [candidates, chunks], and by backward."""

    def __init__(self, memory: ChunkMemory, rank: int, edges: Ints) -> None:
        self.memory, self.phases = memory, memory.phases[rank]
        tables = memory.tables
        self.at = memory.kinds.spans(rank, edges)
        start, stop = self.at
        self.counts = memory.before[stop] - memory.before[start]
        self.all_steps = len(memory.orders[rank])
        self.order = [
            (number, chunk, step)
            for number, (chunk, step) in enumerate(memory.orders[rank])
            if self.counts[:, chunk, step.sort].any()
        ]
        chunks = np.arange(memory.chunks)
        others = self.phases.chunk[:, None] != chunks[None, :]
        ready = others & (self.phases.before | bool(memory.practice.gradient_buffer))
        flight = tables.flight[self.at]
        constant = tables.fixed[self.at].sum(axis=1) + memory.early * tables.received[start].max(
            axis=1
        )
        constant = constant - (memory.chunks - 1) * memory.practice.bucket_bytes
        self.base = constant[:, None] + flight @ self.phases.live.T
        self.base = self.base + tables.gradients[self.at] @ ready.T
        self.base = self.base - tables.given_back[self.at] @ self.phases.done.T
        self.floors = self._by_phase("floor")
        self.plain = self._by_phase("plain") - flight[:, self.phases.chunk]
        self.scratch = tables.scratch[self.at].sum(axis=1)
        self.again_kept = tables.again_kept[self.at]

    def _by_phase(self, name: str) -> Ints:
        """[candidates, backwards] of a table of moments."""
        tables, shape = self.memory.tables, (len(self.counts), len(self.phases.chunk))
        found = np.empty(shape, np.int64)
        for first in (True, False):
            mine = np.flatnonzero(self.phases.first == first)
            if len(mine):
                table = getattr(tables.of(first=first), name)[self.at]
                found[:, mine] = table[:, self.phases.chunk[mine]]
        return found

    def totals(self, gain: Ints, again: Ints) -> Ints:
        """[candidates, states]: bytes of the fullest moment. `gain`: [candidates, states, chunks]
        bytes freed per micro-batch; `again`: [candidates, states, chunks, 2] what recomputed blocks
        need, in the first backward and in later ones."""
        chunk, later = self.phases.chunk, np.where(self.phases.first, 0, 1)
        fullest = np.minimum(self.floors[:, None, :], self.plain[:, None, :] + gain[:, :, chunk])
        fullest = np.maximum(fullest, again[:, :, chunk, later])
        total = self.base[:, None, :] - gain @ self.phases.live.T + fullest
        return np.asarray(np.maximum(total.max(axis=2), self.scratch[:, None]))

    def kept(self) -> Ints:
        """[candidates]: with nothing recomputed."""
        gain = np.zeros((len(self.counts), 1, self.memory.chunks), np.int64)
        return self.totals(gain, np.full((*gain.shape, 2), NONE))[:, 0]

    def floor(self) -> Ints:
        """[candidates]: as if all was recomputed and rebuilt nothing."""
        gain = self._gains()[:, -1:]
        return self.totals(gain, np.full((*gain.shape, 2), NONE))[:, 0]

    def least_extra(self, limit: float) -> Floats:
        """[candidates]: seconds, from what the fullest backward has too much."""
        moments = self.base + np.minimum(self.floors, self.plain)
        fullest = moments.argmax(axis=1)
        need = moments.max(axis=1) - np.floor(limit)
        found = np.where(self.scratch > limit, np.inf, 0.0)
        for phase in np.unique(fullest[need > 0]):
            mine = np.flatnonzero((fullest == phase) & (need > 0))
            seconds = self._seconds_of(mine, need[mine], self.phases.live[phase])
            found[mine] = np.maximum(found[mine], seconds)
        return found

    def _seconds_of(self, some: Ints, need: Floats, live: Ints) -> Floats:
        """[some]: what it takes at least to free so many bytes in a backward with so many
        micro-batches alive in each chunk: steps in the order of their price, the last in part."""
        order = self.memory.recomputation.priced(live)
        blocks = self.counts[some][:, order.chunk, order.sort]
        freed, seconds = np.zeros((2, len(some), len(order.chunk) + 1))
        np.cumsum(blocks * order.freed, axis=1, out=freed[:, 1:])
        np.cumsum(blocks * order.extra, axis=1, out=seconds[:, 1:])
        enough = freed >= need[:, None]
        last, every = enough.argmax(axis=1), np.arange(len(some))
        before = np.maximum(last - 1, 0)
        start, width = freed[every, before], freed[every, last] - freed[every, before]
        part = (need - start) / np.where(width > 0, width, 1.0)
        found = seconds[every, before] + part * (seconds[every, last] - seconds[every, before])
        return np.where(enough.any(axis=1), np.maximum(found, 0.0), np.inf)

    def least(self) -> Ints:
        """[candidates]: the fewest of all states. Within a step, less is kept the further it is."""
        totals = self.totals(self._freed(self._gains()), self._again())
        return np.asarray(totals[:, -1] if self.memory.recomputation.full else totals.min(axis=1))

    def _gains(self) -> Ints:
        """[candidates, states, chunks]: after no step, one, ... all."""
        found = np.zeros((len(self.counts), len(self.order) + 1, self.memory.chunks), np.int64)
        for state, (_, chunk, step) in enumerate(self.order, 1):
            found[:, state, chunk] = self.counts[:, chunk, step.sort] * step.gain
        return np.asarray(found.cumsum(axis=1))

    def _freed(self, gains: Ints) -> Ints:
        """`gains` less what is kept besides as soon as anything is recomputed."""
        blocks = np.zeros(gains.shape[:2], np.int64)
        for state, (_, chunk, step) in enumerate(self.order, 1):
            blocks[:, state] = self.counts[:, chunk, step.sort]
        some = np.cumsum(blocks, axis=1) > 0
        return np.asarray(gains - some[:, :, None] * self.again_kept[:, None, :])

    def _extra(self) -> Floats:
        """[candidates, states, chunks]: seconds, as `_gains`."""
        found = np.zeros((len(self.counts), len(self.order) + 1, self.memory.chunks))
        for state, (_, chunk, step) in enumerate(self.order, 1):
            found[:, state, chunk] = self.counts[:, chunk, step.sort] * step.extra
        return np.asarray(found.cumsum(axis=1))

    def _needed(self, chunk: int, step: Step) -> Ints:
        """[candidates, 2]: what blocks recomputed by a step need, in first and later backwards."""
        first, stop = self.at[0][:, chunk], self.at[1][:, chunk]
        found = np.full((len(first), 2), NONE)
        for later in (0, 1):
            if (self.phases.first == (later == 0)).any():
                again = self.memory.tables.of(first=later == 0).again
                found[:, later] = again[step.way.kind][first, stop]
        return np.where(self.counts[:, chunk, step.sort, None] > 0, found, NONE)

    def _again(self) -> Ints:
        """[candidates, states, chunks, 2], as `_gains`: a step lasts until the next of its sort."""
        states = len(self.order) + 1
        found = np.full((len(self.counts), states, self.memory.chunks, 2), NONE)
        ends: dict[tuple[int, int], int] = {}
        for state, (_, chunk, step) in reversed(list(enumerate(self.order, 1))):
            end = ends.get((chunk, step.sort), states)
            needed = self._needed(chunk, step)[:, None, :]
            np.maximum(found[:, state:end, chunk], needed, out=found[:, state:end, chunk])
            ends[chunk, step.sort] = state
        return found

    def fit(self, limit: float) -> _RankFit:
        """The first state of each candidate that fits, and within its last step the first block."""
        gains, again, extra = self._gains(), self._again(), self._extra()
        totals = self.totals(self._freed(gains), again)
        good = totals <= limit
        if self.memory.recomputation.full:
            fits = np.flatnonzero(good[:, -1])
            steps = np.full(len(fits), self.all_steps)
            return _RankFit(fits, totals[fits, -1], steps, np.zeros_like(fits), extra[fits, -1])
        fits = np.flatnonzero(good.any(axis=1))
        state = good[fits].argmax(axis=1)
        peaks = totals[fits, state]
        steps = np.array([0, *(n + 1 for n, _, _ in self.order)])[state]
        more = np.zeros(len(fits), np.int64)
        seconds = extra[fits, state]
        for number, (order, chunk, step) in enumerate(self.order):
            mine = np.flatnonzero(state == number + 1)
            if not len(mine):
                continue
            some = self._only(fits[mine])
            before = gains[fits[mine], number], again[fits[mine], number]
            blocks, bytes_ = some.part_of(number, before, limit)
            part = blocks < self.counts[fits[mine], chunk, step.sort]
            mine, blocks, bytes_ = mine[part], blocks[part], bytes_[part]
            peaks[mine], steps[mine], more[mine] = bytes_, order, blocks
            seconds[mine] = extra[fits[mine], number]
            seconds[mine, chunk] += blocks * step.extra
        return _RankFit(fits, peaks, steps, more, seconds)

    def part_of(self, number: int, before: tuple[Ints, Ints], limit: float) -> tuple[Ints, Ints]:
        """The fewest blocks of step `number` with which candidates fit, and their bytes, where all
        of its blocks are enough. `before`: bytes freed and needed before it."""
        _, chunk, step = self.order[number]
        gains, again = before[0][:, None], before[1][:, None].copy()
        needed = self._needed(chunk, step)[:, None]
        again[:, :, chunk] = np.maximum(again[:, :, chunk], needed)

        def bytes_of(blocks: Ints) -> Ints:
            gain = gains - self.again_kept[:, None]
            gain[:, 0, chunk] += blocks * step.gain
            return self.totals(gain, again)[:, 0]

        most = self.counts[:, chunk, step.sort].copy()
        least = np.ones_like(most)
        while (least < most).any():
            middle = (least + most) // 2
            good = bytes_of(middle) <= limit
            open_ = least < most
            most = np.where(open_ & good, middle, most)
            least = np.where(open_ & ~good, middle + 1, least)
        return most, bytes_of(most)

    def _only(self, candidates: Ints) -> _Rank:
        """The same of some candidates."""
        found = object.__new__(_Rank)
        found.memory, found.phases, found.order = self.memory, self.phases, self.order
        found.at = (self.at[0][candidates], self.at[1][candidates])
        for name in ("counts", "base", "floors", "plain", "scratch", "again_kept"):
            setattr(found, name, getattr(self, name)[candidates])
        return found
