"""Lower bounds on a configuration without searching its cuts: what lets the outer search skip it.

Time: stages perfectly balanced, nothing recomputed, the shortest possible sends. Memory: everything
that must be somewhere, spread evenly, with every block at its smallest. Both hold for every choice
of cuts and recomputation, and stay valid when the prices themselves are lower bounds.

Settings that differ in `dp_replicate` alone can be bounded together: each term of a block's time is
the least of theirs, and the bytes are those of the first, which shards over the most ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np

from autopar.block_cost import BlockCost, Held, tie_groups
from autopar.cost import memory
from autopar.cost.block_moment import gathered_bytes, inside_bytes
from autopar.cost.setting import Phase, Setting
from autopar.cost.step import (
    BlockTimes,
    DpTimes,
    behind_others,
    block_times,
    copies_seconds,
    dp_collectives,
    exposed,
)
from autopar.interleaving import round_size
from autopar.search import interleaved, zero_bubble
from autopar.search.any_chunks import AnyChunks
from autopar.search.chain import Chain, Floats, Ints, sums_before
from autopar.search.interleaved.times import ChunkTimes, chunk_times


@dataclass(frozen=True)
class Bound:
    """`seconds` of a step and `peak` bytes of the fullest rank: neither can be undercut."""

    seconds: float
    peak: int


def bound(
    chain: Chain,
    setting: Setting,
    *,
    sums: bool = False,
    exact: bool = False,
    among: Sequence[Setting] = (),
    optimistic: Chain | None = None,
    keeps_within: int | None = None,
) -> Bound:
    """The optimistic price of `setting` for a model with these blocks.

    `sums`: only the sum of forward and backward is known of a block, not how it divides. `exact`:
    the prices are no lower bounds. `among`: the setting and others that shard over fewer ranks; the
    bound is one for all of them. `optimistic`: prices that tell what the bytes are at least, and
    the seconds of forwards, where `chain` doesn't. `keeps_within`: ZeRO-3 may keep blocks gathered,
    as many as fit in so many bytes of a rank.
    """
    keys, held = _keys(among or (setting,), exact=exact), optimistic or chain
    if keeps_within is None or not setting.may_keep:
        return Bound(_seconds(chain, setting, _totals(chain, keys, sums)), _peak(held, setting))
    peak, together = _peaks(held, setting)
    room = max(0, setting.mesh.pp * keeps_within - together)
    return Bound(_seconds(chain, setting, _kept_totals(chain, keys, sums, room)), peak)


def cut_seconds(
    chain: Chain,
    setting: Setting,
    limit: float,
    target: float = float("inf"),
    *,
    sums: bool = False,
    exact: bool = False,
    among: Sequence[Setting] = (),
    optimistic: Chain | None = None,
) -> float:
    """`bound` of an interleaved setting over its family of cuts, in seconds; `inf` where none of
    them can fit. Above `target` it need not be tight. `sums`, `among`: as for `bound`; `exact`: the
    prices are no lower bounds, so that what memory asks for can be told; `optimistic`: as for
    `bound`."""
    held = optimistic or chain
    keys = _keys(among or (setting,), exact=exact)
    if sums or len(keys) > 1:
        times = _least_chunk_times(chain, keys, sums)
    else:
        times = chunk_times(chain, keys[0])
    if setting.divided:
        return zero_bubble.family_bound(chain, held, setting, times, limit, target, exact=exact)
    return interleaved.family_bound(chain, held, setting, times, limit, target, exact=exact)


def _keys(among: Sequence[Setting], *, exact: bool) -> tuple[AnyChunks, ...]:
    """Those of settings. Where prices are bounds, backwards that are divided have the times of
    others, which hide more of the end of a step: then it is told once for both."""
    whole = (s if exact or not s.divided else replace(s, schedule="interleaved") for s in among)
    return tuple(map(AnyChunks, whole))


@lru_cache(maxsize=2048)
def _least_chunk_times(chain: Chain, keys: tuple[AnyChunks, ...], sums: bool) -> ChunkTimes:
    times = [_least_times(b, keys, sums) for b in chain.distinct]
    return ChunkTimes.of(chain, times, keys[0].setting)


def _least_times(block: BlockCost, keys: Sequence[AnyChunks], sums: bool) -> BlockTimes:
    """Of each term the least over some settings."""
    found = [(_sum_times if sums else block_times)(block, key.setting) for key in keys]
    if len(found) == 1:
        return found[0]
    return BlockTimes(*(min(getattr(t, f.name) for t in found) for f in fields(BlockTimes)))


def _sum_times(block: BlockCost, setting: Setting) -> BlockTimes:
    """Lower bounds of `block_times` over all divisions of the block's seconds.

    What n1 seconds of communication add to h1 seconds of compute is n1 less a share of
    min(n1, h1), so n1 behind h1 and n2 behind h2 add no less than n1 + n2 behind h1 + h2.
    """
    kept = end = 0.0
    if setting.mesh.replicas > 1:
        gather, reduce = collectives = dp_collectives(block, setting)
        if setting.zero == 3:
            kept = _exposed(gather, gather + reduce, block.seconds, setting)
        elif setting.zero == 2:
            kept = _exposed(0.0, reduce, block.seconds, setting)
            end = _exposed(gather, 0.0, block.seconds, setting)
        else:
            end = _exposed(gather if setting.zero else 0.0, reduce, block.seconds, setting)
        if copies := copies_seconds(block, setting):
            end += behind_others(copies, block.seconds, collectives, setting)
    return block_times(block, setting, DpTimes(kept, kept, 0.0, end, 0.0))


def _exposed(gathers: float, gradients: float, hiding: float, setting: Setting) -> float:
    """What stays exposed of both kinds of communication together behind `hiding` seconds."""
    practice = setting.practice
    hidden = (gathers if practice.overlap_gathers else 0.0) + (
        gradients if practice.overlap_gradients else 0.0
    )
    return gathers + gradients - hidden + exposed(hidden, hiding, setting)


@dataclass(frozen=True, slots=True)
class _Totals:
    """Seconds over all blocks, sums and extremes."""

    kept: float
    longest: float
    first: float
    least_first: float
    least_send: float
    end: float
    longest_end: float
    end_first: float
    least_end_first: float


@lru_cache(maxsize=16)
def _times(chain: Chain, keys: tuple[AnyChunks, ...], sums: bool) -> list[BlockTimes]:
    """Of the distinct blocks."""
    return [_least_times(b, keys, sums) for b in chain.distinct]


@lru_cache(maxsize=16384)
def _totals(chain: Chain, keys: tuple[AnyChunks, ...], sums: bool) -> _Totals:
    setting = keys[0].setting
    times = _times(chain, keys, sums)
    kept = chain.seconds(times, lambda t: t.kept)
    sends = chain.seconds(times, lambda t: t.send)
    first = chain.seconds(times, lambda t: t.first_gather)
    end = chain.seconds(times, lambda t: t.end_dp + t.end_tp + t.end_optimizer)
    end_first = chain.seconds(times, lambda t: t.end_first)
    return _Totals(
        *(float(kept.sum()), float(kept.max()), float(first[0]), float(first.min())),
        float(sends[:-1].min()) if setting.mesh.pp > 1 else 0.0,
        *(float(end.sum()), float(end.max()), float(end_first[0]), float(end_first.min())),
    )


@lru_cache(maxsize=16384)
def _keeping(keys: tuple[AnyChunks, ...]) -> tuple[AnyChunks, ...]:
    return tuple(AnyChunks(key.setting.keeping) for key in keys)


def _kept_totals(chain: Chain, keys: tuple[AnyChunks, ...], sums: bool, room: int) -> _Totals:
    """`_totals` when blocks may be kept gathered that take no more than `room` bytes on all stages
    together: those that save the most per byte, one of them in part (the fractional knapsack)."""
    plain, kept = _totals(chain, keys, sums), _totals(chain, _keeping(keys), sums)
    nbytes, seconds = _savings(chain, keys, sums)
    saved = float(np.interp(room, nbytes, seconds))
    return _Totals(
        *(plain.kept - saved, kept.longest, 0.0, 0.0, plain.least_send),
        *(min(plain.end, kept.end), min(plain.longest_end, kept.longest_end)),
        *(min(plain.end_first, kept.end_first), min(plain.least_end_first, kept.least_end_first)),
    )


@lru_cache(maxsize=16384)
def _savings(chain: Chain, keys: tuple[AnyChunks, ...], sums: bool) -> tuple[Ints, Floats]:
    """Bytes of kept blocks, and the seconds of a micro-batch that they save at most."""
    before = [t.kept for t in _times(chain, keys, sums)]
    after = [t.kept for t in _times(chain, _keeping(keys), sums)]
    saves = np.maximum(0.0, np.array(before) - np.array(after))[chain.which]
    everywhere = tie_groups(chain.blocks)
    setting = keys[0].setting
    nbytes = chain.ints(lambda b: gathered_bytes(b, setting, rooted=everywhere))
    order = np.argsort(-saves / np.maximum(nbytes, 1), kind="stable")
    # What takes no bytes is there without any.
    free = float(saves[nbytes == 0].sum())
    order = order[nbytes[order] > 0]
    return sums_before(nbytes[order]), free + sums_before(saves[order])


def _seconds(chain: Chain, setting: Setting, t: _Totals) -> float:
    pp, m = setting.mesh.pp, setting.microbatches
    parts = pp * setting.chunks
    sends = 2 * (parts - 1 - len(setting.turns))
    total = t.kept + t.first + (parts - 1) * t.least_first + sends * t.least_send
    slowest = max(total / pp, t.longest)
    end = max((t.end + t.end_first + (pp - 1) * t.least_end_first) / pp, t.longest_end)
    if not setting.in_turns:
        return total + (m - 1) * slowest + end
    # In turns, a rank is busy for all micro-batches, and one of them goes through all parts (if
    # backwards are divided, not with the gradients of weights).
    return max(m * slowest, 0.0 if setting.divided else total) + end


def _peak(chain: Chain, setting: Setting) -> int:
    if setting.in_turns:
        return _interleaved_peak(chain, setting)
    return _peaks(chain, setting)[0]


def _peaks(chain: Chain, setting: Setting) -> tuple[int, int]:
    """Bytes of the fullest rank, and of all stages together without what is gathered, at least."""
    pp = setting.mesh.pp
    # Earlier stages have no fewer micro-batches in flight.
    found = [_peaks_in(chain, setting, phase) for phase in setting.phases(pp - 1)]
    everywhere = tie_groups(chain.blocks)
    gathered = gathered_bytes(chain.blocks[-1], setting, rooted=everywhere)
    peak = max(max(alone, together // pp) for alone, together in found)
    return peak, max(together for _, together in found) - gathered


def _peaks_in(chain: Chain, setting: Setting, phase: Phase) -> tuple[int, int]:
    """At the fullest moment of one of its backwards, bytes of the rank with the largest block, and
    of all stages together, at least."""
    pp, most = setting.mesh.pp, phase.in_flight
    states = _states_of(chain, setting, not phase.first)
    kept = chain.ints(lambda b: b.least_kept)
    everywhere = tie_groups(chain.blocks)
    extra = chain.ints(inside_bytes) + chain.ints(
        lambda b: gathered_bytes(b, setting, rooted=everywhere)
    )
    alone = states + most * kept + extra
    twice = _held_twice(chain, setting, not phase.first)
    # What a stage sends is kept per micro-batch.
    boundary = chain.ints(lambda b: b.boundary_bytes)
    passing = (pp - 1) * most * int(boundary[:-1].min()) if pp > 1 else 0
    # The last block of the chain works last in its stage, when all is kept; so do others.
    together = int(states.sum() + most * kept.sum() + extra[-1]) + passing - twice
    return int(alone.max()), together


def _interleaved_peak(chain: Chain, setting: Setting) -> int:
    pp, m = setting.mesh.pp, setting.microbatches
    # From the second round on a chunk has gradients while all chunks of its rank are alive; in the
    # first one all are alive when the last chunk begins, and there are no gradients.
    gradients = m > round_size(pp, m)
    alone, together, boundary = _one_of_each(chain, AnyChunks(setting), gradients)
    return max(alone, (together + (pp * setting.chunks - 1) * boundary) // pp)


@lru_cache(maxsize=16384)
def _one_of_each(chain: Chain, key: AnyChunks, gradients: bool) -> tuple[int, int, int]:
    """Bytes of the largest block, of all blocks, and of the smallest boundary, with one micro-batch
    in flight."""
    setting = key.setting
    states = _states_of(chain, setting, gradients)
    kept = chain.ints(lambda b: b.least_kept)
    twice = _held_twice(chain, setting, gradients)
    boundary = chain.ints(lambda b: b.boundary_bytes)
    together = int(states.sum() + kept.sum()) - twice
    return int((states + kept).max()), together, int(boundary[:-1].min())


def _states_of(chain: Chain, setting: Setting, gradients: bool) -> Ints:
    """Parameters, optimizer state and, if they are there, gradients of every block."""
    return chain.ints(lambda b: _states(b, setting, gradients))


def _held_twice(chain: Chain, setting: Setting, gradients: bool) -> int:
    """What the states of all blocks count too often where one rank holds all blocks of each group
    of tied parameters."""
    found = 0
    for group in tie_groups(chain.blocks):
        same = chain.tied(group, lambda t: _states(t, setting, gradients))
        found += int(same.sum() - same.max())
    return found


def _states(held: Held, setting: Setting, gradients: bool) -> int:
    return memory.state_bytes(held, setting) + gradients * memory.gradient_bytes(held, setting)
