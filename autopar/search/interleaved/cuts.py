"""Cuts of an interleaved pipeline into near-even numbers of blocks: a family that holds Megatron's.

A chain of n blocks becomes k = pp x chunks parts. The first part has a blocks and the last one b,
for every a and b from 1 to two more than an even share (where that is long: those within 4 blocks
of it, then 8, 16, ... fewer, and 1 and 2). The parts between them share the rest evenly, and where
it does not divide the parts with one block more stand side by side, beginning with any of the first
pp of them. So with an embedding before and a head behind l layers the family holds Megatron's even
split (a = b = 1 + l / k), and every lighter first and last part. Micro-batches take turns through
all parts, so what one part has more than its neighbours holds up every rank. Of two parts (two
ranks with a chunk each) the family has all cuts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from autopar.search.chain import Cutting, Ints
from autopar.search.interleaved.times import by_rank, sums

MORE_THAN_EVEN = 2
CLOSE_TO_EVEN = 4


@lru_cache(maxsize=256)
def cuts(blocks: int, pp: int, chunks: int) -> Ints:
    """[candidates, k + 1]: where each part begins, and the number of blocks; empty when there are
    fewer blocks than parts."""
    parts = pp * chunks
    if parts == 2:
        inner = np.arange(1, blocks)
        return np.stack([0 * inner, inner, 0 * inner + blocks], axis=1)
    most = blocks - parts + 1
    ends = [size for size in end_sizes(-(-blocks // parts)) if size <= most]
    between = parts - 2
    found = []
    for first in ends:
        for last in ends:
            rest = blocks - first - last
            if rest < between:
                continue
            share, more = divmod(rest, between)
            for start in range(min(pp, between) if more else 1):
                sizes = np.full(parts, share, np.int64)
                sizes[0], sizes[-1] = first, last
                sizes[1 + (start + np.arange(more)) % between] += 1
                found.append(sizes)
    if not found:
        return np.zeros((0, parts + 1), np.int64)
    unique = np.unique(np.array(found), axis=0)
    zero = np.zeros((len(unique), 1), np.int64)
    edges = np.concatenate([zero, np.cumsum(unique, axis=1)], axis=1)
    edges.setflags(write=False)
    return edges


@lru_cache(maxsize=1024)
def legal_cuts(rules: Cutting, pp: int, chunks: int, turns: bool) -> Ints:
    """Those of `cuts` that are `legal`."""
    found = legal(cuts(len(rules), pp, chunks), rules, pp, turns=turns)
    found.setflags(write=False)
    return found


def legal(edges: Ints, rules: Cutting, pp: int, *, turns: bool) -> Ints:
    """Those candidates that end parts where they may, with a parameter in every part, and tied
    parameters in at most one part of a rank. `turns`: the parts make a V."""
    found = edges[rules.ends[edges[:, 1:-1] - 1].all(axis=1)]
    found = found[sums(rules.holds, found).min(axis=1, initial=1) > 0]
    for tied in rules.tied:
        found = found[on_one_rank(found, tied, pp, turns=turns) <= 1]
    return np.asarray(found)


def end_sizes(even: int) -> list[int]:
    """How many blocks the first and the last part may have, where an even share has `even`."""
    fewer = [*range(CLOSE_TO_EVEN + 1), *(1 << k for k in range(3, even.bit_length()))]
    found = {1, 2, *range(even, even + MORE_THAN_EVEN + 1), *(even - f for f in fewer)}
    return sorted(size for size in found if 1 <= size <= even + MORE_THAN_EVEN)


def given(starts: Sequence[int], blocks: int) -> Ints:
    """The one candidate of given first blocks."""
    return np.array([[*starts, blocks]], np.int64)


def on_one_rank(edges: Ints, tied: Ints, pp: int, *, turns: bool) -> Ints:
    """[candidates]: the largest number of parts of one rank that hold tied parameters.

    `tied`: 1 where a block holds some. The runtime keeps one copy of a tied parameter
    on a rank, so more than one part is not legal.
    """
    holds = (sums(tied, edges) > 0).astype(np.int64)
    return np.asarray(by_rank(holds, pp, turns=turns).max(axis=1, initial=0))
