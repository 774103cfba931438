"""Bytes of the ranks of an interleaved pipeline, and the recomputation that makes them fit.

A rank holds its parts as one stage holds its blocks (`autopar.cost.memory`), but for activations:
each of its parts has its own number of micro-batches in flight, as the action list says, and the
fullest moment is that of the largest sum.

Of recomputation a family is searched, rank by rank: blocks in the order of the seconds that they
add per byte that they free at most (ties: in the order of the chain), and of this order the
shortest beginning that fits. Ranks do not share memory, and longer beginnings take longer, so the
shortest is the best of the family.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.cost.pipeline import actions
from autopar.cost.setting import Setting
from autopar.interleaving import round_size, waiting
from autopar.search.block_bytes import BlockBytes
from autopar.search.chain import Floats, Ints
from autopar.search.chunk_times import sums

# After as many rounds the numbers in flight repeat: warm-up takes less than two of them.
ROUNDS = 4


@lru_cache(maxsize=512)
def live_counts(pp: int, microbatches: int, chunks: int) -> tuple[Ints, ...]:
    """For each rank [moments, chunks]: micro-batches in flight through each chunk, for all moments
    that can be the fullest one."""
    size = round_size(pp, microbatches)
    fewer = min(microbatches, ROUNDS * size)
    if round_size(pp, fewer) != size:
        fewer = microbatches
    found = []
    for order in actions("interleaved", pp, fewer, chunks):
        live, seen = [0] * chunks, set()
        for action in order:
            live[action.chunk] += 1 if action.kind == "F" else -1
            if action.kind == "F":
                seen.add(tuple(live))
        moments = sorted(seen, reverse=True)
        largest = [m for m in moments if not any(_above(other, m) for other in moments)]
        found.append(np.array(largest, np.int64))
    return tuple(found)


def _above(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return one != other and all(a >= b for a, b in zip(one, other, strict=True))


@dataclass(frozen=True)
class Fitted:
    """Bytes of every rank, and the blocks that are recomputed so that they fit."""

    peaks: tuple[int, ...]
    recompute: tuple[int, ...]


class ChunkMemory:
    """Memory of one setting. `extra`: seconds that recomputing each block adds."""

    def __init__(self, blocks: BlockBytes, setting: Setting, extra: Floats) -> None:
        self.blocks, self.extra = blocks, extra
        self.pp, self.chunks = setting.mesh.pp, setting.chunks
        self.live = live_counts(self.pp, setting.microbatches, self.chunks)
        self.passing = 1 + waiting(self.pp, setting.microbatches)

    def _kept(self, edges: Ints, values: Ints) -> Ints:
        """[candidates, chunks, ranks]: what a micro-batch keeps in each part, where its blocks keep
        `values`."""
        total = sums(values, edges).astype(np.int64) + self.blocks.crossing(edges)
        return total.reshape(len(edges), self.chunks, self.pp)

    def _ranks(self, edges: Ints, values: Ints) -> Ints:
        """[candidates, ranks]: all bytes where blocks keep `values`, and rebuild nothing."""
        fixed, end = self.blocks.fixed(edges, self.pp, self.passing)
        kept = self._kept(edges, values)
        active = [(kept[:, :, r] @ live.T).max(axis=1) for r, live in enumerate(self.live)]
        return np.asarray(np.maximum(fixed + np.stack(active, axis=1), end))

    def floors(self, edges: Ints) -> Ints:
        """[candidates]: the fullest rank has no less, whatever is recomputed."""
        blocks = self.blocks
        smallest = blocks.saved - np.maximum(blocks.gain, 0)
        return np.asarray(self._ranks(edges, smallest).max(axis=1))

    def least_extra(self, edges: Ints, limit: float) -> Floats:
        """[candidates, ranks]: recomputation adds no less to every micro-batch, for a rank to fit:
        every byte that is too much is freed at the lowest price of any block."""
        useful = self.blocks.gain > 0
        need = np.maximum(self._ranks(edges, self.blocks.saved) - np.floor(limit), 0)
        if not useful.any():
            return np.where(need > 0, np.inf, 0.0)
        price = float((self.extra[useful] / self.blocks.gain[useful]).min())
        # A block frees its bytes at most once for each micro-batch of its chunk.
        most = np.array([live.max() for live in self.live])
        return np.asarray(need * (max(price, 0.0) / most))

    def fit(self, edges: Ints, limit: float, recompute: str) -> Fitted | None:
        """One candidate's [parts + 1] with the least recomputation (`auto`), `none`, or `full`;
        None when it does not fit in `limit` bytes."""
        peaks, chosen = [], []
        for order, totals in self._by_rank(edges, recompute):
            fits = np.flatnonzero(totals <= limit)
            if recompute == "full":
                fits = fits[fits == len(order)]
            if not len(fits):
                return None
            peaks.append(int(totals[fits[0]]))
            chosen += order[: fits[0]].tolist()
        return Fitted(tuple(peaks), tuple(sorted(chosen)))

    def least(self, edges: Ints, recompute: str) -> int:
        """The fewest bytes that one candidate's fullest rank can do with."""
        ranks = self._by_rank(edges, recompute)
        return max(int(t[-1] if recompute == "full" else t.min()) for _, t in ranks)

    def _by_rank(self, edges: Ints, recompute: str) -> Iterator[tuple[Ints, Ints]]:
        """For each rank the order of recomputation, and its bytes with 0, 1, ... of it."""
        both = self.blocks.fixed(edges[None], self.pp, self.passing)
        fixed, end = (table[0] for table in both)
        kept = self._kept(edges[None], self.blocks.saved)[0]
        for rank in range(self.pp):
            order, activations = self._beginnings(edges, rank, kept[:, rank], recompute)
            yield order, np.maximum(activations + fixed[rank], end[rank])

    def _beginnings(self, edges: Ints, rank: int, kept: Ints, recompute: str) -> tuple[Ints, Ints]:
        """The blocks of a rank in the order of recomputation, and the bytes of activations with 0,
        1, ... of them recomputed."""
        live, gain = self.live[rank], self.blocks.gain
        order = where = np.zeros(0, np.int64)
        if recompute in ("auto", "full"):  # in part only where ranks hold one part
            parts = [
                np.arange(edges[i], edges[i + 1]) for i in range(rank, len(edges) - 1, self.pp)
            ]
            order = np.concatenate(parts)
            where = np.repeat(np.arange(self.chunks), [len(part) for part in parts])
        if recompute == "auto":
            useful = gain[order] > 0
            order, where = order[useful], where[useful]
            freed = gain[order] * live.max(axis=0)[where]
            by_price = np.lexsort((order, self.extra[order] / freed))
            order, where = order[by_price], where[by_price]
        less = np.zeros((len(order) + 1, self.chunks), np.int64)
        less[np.arange(1, len(order) + 1), where] = gain[order]
        keeps = kept[None] - np.cumsum(less, axis=0)
        rebuilt = np.concatenate([[0], np.maximum.accumulate(self.blocks.rebuilt[order])])
        return order, np.asarray((keeps @ live.T).max(axis=1) + rebuilt)
