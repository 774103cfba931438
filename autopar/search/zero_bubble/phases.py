"""The halves of backwards that can be the fullest moment of each rank of a pipeline with divided
backwards.

As `autopar.search.interleaved.phases`: of the halves of one kind in one chunk those are left out in
which no chunk has more micro-batches before their backward, more between its halves, or more
gradients, than in another one, and those that lie between two others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost.pipeline import divided_order
from autopar.cost.setting import Setting
from autopar.search.chain import Ints
from autopar.search.interleaved.phases import as_good, bent, without_smaller


@dataclass(frozen=True)
class HalfPhases:
    """Of one rank, for each half: the `chunk` that works, whether it is a `second` half, and
    whether there was no second half of the chunk before it (`first`); [halves, chunks]:
    micro-batches alive (`live`), those between the halves (`delayed`), which chunks had a second
    half `before`, and which all of theirs (`done`)."""

    chunk: Ints
    second: NDArray[np.bool_]
    first: NDArray[np.bool_]
    live: Ints
    delayed: Ints
    before: NDArray[np.bool_]
    done: NDArray[np.bool_]


def half_phases(setting: Setting) -> Iterator[HalfPhases]:
    """Those of every rank; of each they are found as it is asked for."""
    pp = setting.mesh.pp
    enough = as_good(pp, setting.microbatches)
    given = pp, enough, setting.chunks
    return (_phases(setting.schedule, rank, *given) for rank in range(pp))


@lru_cache(maxsize=16384)
def _phases(schedule: str, rank: int, pp: int, microbatches: int, chunks: int) -> HalfPhases:
    chunk, _, kind = divided_order(schedule, rank, pp, microbatches, chunks)
    return _of_rank(chunk, kind, chunks)


def _of_rank(chunk: Ints, kind: Ints, chunks: int) -> HalfPhases:
    own = chunk[:, None] == np.arange(chunks)[None, :]
    done = [np.cumsum(own & (kind == k)[:, None], axis=0) for k in range(3)]
    # As a half starts, it has not ended.
    ended = done[2] - (own & (kind == 2)[:, None])
    begun = done[1] - (own & (kind == 1)[:, None])
    halves = kind > 0
    tables = done[0] - ended, begun - ended, ended > 0, ended < done[2][-1]
    live, delayed, before, open_ = (x[halves] for x in tables)
    whole = live - delayed
    working, second = chunk[halves], kind[halves] == 2
    first = ~before[np.arange(len(working)), working]
    rows = np.column_stack([working, second, first, before, open_, whole, delayed])
    # What is alive changes evenly from one half to the next of its sort, not to the one in between.
    rows = np.concatenate([bent(rows[second == sort], 3 + 2 * chunks) for sort in (False, True)])
    rows = without_smaller(rows, 3)
    before, open_, whole, delayed = (
        rows[:, 3 + i * chunks : 3 + (i + 1) * chunks] for i in range(4)
    )
    second, first = rows[:, 1] > 0, rows[:, 2] > 0
    live, working = whole + delayed, rows[:, 0]
    return HalfPhases(working, second, first, live, delayed, before > 0, open_ == 0)
