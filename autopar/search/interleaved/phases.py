"""The backwards of a step that can be the fullest moment of each rank of an interleaved pipeline.

What is alive when a backward starts follows from the order of actions alone. Of the backwards of
one chunk those are left out in which no chunk has more micro-batches alive, nor more gradients,
than in another one, and those that lie between two others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost.pipeline import interleaved_order
from autopar.interleaving import round_size
from autopar.search.chain import Ints

# After as many rounds the numbers in flight repeat: warm-up takes less than two of them.
ROUNDS = 4


@dataclass(frozen=True)
class Phases:
    """Of one rank, for each of its backwards: the `chunk` that works and whether it is its `first`
    of the step; [backwards, chunks]: micro-batches alive (`live`), which chunks had a backward
    `before`, and which all of theirs (`done`). `most`: the most that are alive in each chunk."""

    chunk: Ints
    first: NDArray[np.bool_]
    live: Ints
    before: NDArray[np.bool_]
    done: NDArray[np.bool_]

    @property
    def most(self) -> Ints:
        return np.asarray(self.live.max(axis=0))


def phases(pp: int, microbatches: int, chunks: int) -> tuple[Phases, ...]:
    """Those of every rank."""
    return _phases(pp, as_good(pp, microbatches), chunks)


def as_good(pp: int, microbatches: int) -> int:
    """So many micro-batches have all that can be the fullest moment of a step with more."""
    size = round_size(pp, microbatches)
    fewer = min(microbatches, ROUNDS * size)
    return fewer if round_size(pp, fewer) == size else microbatches


@lru_cache(maxsize=1024)
def _phases(pp: int, microbatches: int, chunks: int) -> tuple[Phases, ...]:
    orders = [interleaved_order(rank, pp, microbatches, chunks) for rank in range(pp)]
    return tuple(_of_rank(chunk, forward, chunks) for chunk, _, forward in orders)


def _of_rank(chunk: Ints, forward: NDArray[np.bool_], chunks: int) -> Phases:
    """Of the actions of one rank: the chunk of each, and whether it is a forward."""
    own = chunk[:, None] == np.arange(chunks)[None, :]
    ended = np.cumsum(own & ~forward[:, None], axis=0)
    live = np.cumsum(own & forward[:, None], axis=0) - ended
    # As a backward starts, it has not ended.
    live, before = (live + own)[~forward], ((ended - own) > 0)[~forward]
    working = chunk[~forward]
    begun = before[np.arange(len(working)), working]
    open_ = (ended - own < ended[-1])[~forward]
    rows = np.column_stack([working, begun, before, open_, live])
    return _largest(bent(rows, 2 + 2 * chunks), chunks)


def bent(rows: Ints, fixed: int) -> Ints:
    """Without rows that lie between their neighbours, all but for the numbers alive (behind the
    first `fixed` columns) alike: bytes are linear in these, so one of the neighbours has more."""
    one, two = rows[1:-1] - rows[:-2], rows[2:] - rows[1:-1]
    between = ((one == two) & ((np.arange(rows.shape[1]) >= fixed) | (one == 0))).all(axis=1)
    kept = np.ones(len(rows), bool)
    kept[1:-1] = ~between
    return np.asarray(np.unique(rows[kept], axis=0))


def _largest(rows: Ints, chunks: int) -> Phases:
    """Without rows that another one of the same chunk is above: [chunk, begun, before, open, live],
    where open chunks are not done.

    A first backward is held against first ones alone, as gradients are made in it.
    """
    rows = without_smaller(rows, 2)
    return Phases(
        chunk=rows[:, 0],
        first=rows[:, 1] == 0,
        live=rows[:, 2 + 2 * chunks :],
        before=rows[:, 2 : 2 + chunks] > 0,
        done=rows[:, 2 + chunks : 2 + 2 * chunks] == 0,
    )


def without_smaller(rows: Ints, fixed: int) -> Ints:
    """Without distinct rows of which another one, alike in the first `fixed` columns, has no less
    in any other."""
    below = (rows[:, None, :fixed] == rows[None, :, :fixed]).all(axis=2)
    below &= (rows[:, None, fixed:] <= rows[None, :, fixed:]).all(axis=2)
    below &= ~np.eye(len(rows), dtype=bool)
    return np.asarray(rows[~below.any(axis=1)])
