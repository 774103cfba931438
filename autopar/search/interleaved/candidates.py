"""The cuts of a chain that are searched where parts of it take turns.

All of them where these are few. Else those with near-even numbers of blocks (`cuts`) and, where
blocks between the first and the last one are unlike, those that balance their work (`balanced`),
and where memory may be short, those at even shares of their bytes, and of both (`moves`).
For one chain on the ranks of one setting they do not depend on what is known of prices, so that
bounds hold for the cuts that are solved later.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from math import comb

import numpy as np

from autopar.cost.setting import Setting
from autopar.interleaving import V_SHAPED
from autopar.search.chain import Chain, Cutting, Ints
from autopar.search.interleaved.balanced import balanced
from autopar.search.interleaved.cuts import given, legal, legal_cuts
from autopar.search.interleaved.moves import at_shares
from autopar.search.interleaved.work import Load, Work, load_of, work_of

# Of alike blocks, near-even numbers are all there is to balance where a part has so many.
COARSE = 3
# Parts that bytes have in the shares by which blocks are divided, where memory may be short.
LOADED = (0.5, 1.0)
# So many cuts are searched one and all.
FEW_CUTS = 3000


def candidates(chain: Chain, setting: Setting, starts: Sequence[int] | None) -> Ints:
    """[candidates, parts + 1]: the legal cuts of a setting (see `Columns.legal`); given
    `starts`, at most those."""
    pp, chunks, turns = setting.mesh.pp, setting.chunks, bool(setting.turns)
    if starts is None:
        known = work_of(chain, setting), load_of(chain, setting), chain.cutting
        return _searched(*known, setting.schedule, pp, chunks)
    if len(starts) != pp * chunks:
        return np.zeros((0, pp * chunks + 1), np.int64)
    return legal(given(starts, len(chain)), chain.cutting, pp, turns=turns)


def all_are_searched(blocks: int, parts: int) -> bool:
    """Whether no cut of so many blocks is left out."""
    return comb(blocks - 1, parts - 1) <= FEW_CUTS


@lru_cache(maxsize=4096)
def _searched(work: Work, load: Load, rules: Cutting, schedule: str, pp: int, chunks: int) -> Ints:
    turns, blocks = schedule in V_SHAPED, len(rules)
    if pp * chunks <= blocks and all_are_searched(blocks, pp * chunks):
        return _all(rules, pp, chunks, turns)
    even = legal_cuts(rules, pp, chunks, turns)
    if len(even) and work.alike and blocks >= COARSE * pp * chunks:
        return even
    found = balanced(work, rules, schedule, pp, chunks)
    shares = (work.share * (1 - part) + load.share * part for part in LOADED)
    by_load = np.concatenate([at_shares(share, rules, pp * chunks) for share in shares])
    every = np.concatenate([found, legal(by_load, rules, pp, turns=turns)])
    every.setflags(write=False)
    return every


@lru_cache(maxsize=1024)
def _all(rules: Cutting, pp: int, chunks: int, turns: bool) -> Ints:
    blocks, parts = len(rules), pp * chunks
    inner = np.array(list(combinations(range(1, blocks), parts - 1)), np.int64)
    inner = inner.reshape(-1, parts - 1)
    edges = np.pad(inner, ((0, 0), (1, 1)))
    edges[:, -1] = blocks
    found = legal(edges, rules, pp, turns=turns)
    found.setflags(write=False)
    return found
