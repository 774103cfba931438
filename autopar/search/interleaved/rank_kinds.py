"""Candidate cuts that are alike for a rank, so that its bytes are counted once for all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from autopar.cost.setting import Setting
from autopar.search.chain import Chain, Ints
from autopar.search.interleaved.contents import Contents, distinct
from autopar.search.moment_tables import IntervalMoments


@lru_cache(maxsize=64)
def _contents(chain: Chain) -> Contents:
    return Contents(chain.which)


class RankKinds:
    """The ranks of a setting, each with chunks of the chain; `tables` tell what passes their
    borders. `batch`: of so many kinds at a time bytes are counted."""

    def __init__(self, chain: Chain, tables: IntervalMoments, setting: Setting, batch: int) -> None:
        self._contents, self._tables = _contents(chain), tables
        self._pp, self._batch = setting.mesh.pp, batch
        self._parts = [np.array(setting.parts_of(rank)) for rank in range(self._pp)]

    def distinct(self, rank: int, edges: Ints) -> tuple[Ints, Ints]:
        """Candidates whose chunks of a rank differ: the first of each kind, and every one's kind.
        They are alike where they hold the same blocks and have the same values at their borders."""
        start, stop = self.spans(rank, edges)
        borders = np.stack([self._tables.received[start], self._tables.sent[stop]], axis=2)
        rows = np.concatenate([self._contents(start, stop), borders], axis=2)
        return distinct(rows.reshape(len(edges), -1))

    def spans(self, rank: int, edges: Ints) -> tuple[Ints, Ints]:
        """[candidates, chunks]: where the parts of a rank begin, and end."""
        held = self._parts[rank]
        return edges[:, held], edges[:, held + 1]

    def of_ranks(self, edges: Ints, of: Callable[[int, Ints], Ints]) -> Ints:
        """[candidates, ranks]: `of` a rank and candidates."""
        found = np.empty((len(edges), self._pp), np.int64)
        if not len(edges):
            return found
        for rank in range(self._pp):
            first, kind = self.distinct(rank, edges)
            some = [
                of(rank, edges[first[begin : begin + self._batch]])
                for begin in range(0, len(first), self._batch)
            ]
            found[:, rank] = np.concatenate(some)[kind]
        return found
