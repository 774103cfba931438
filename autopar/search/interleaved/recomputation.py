"""The order in which the blocks of a rank of an interleaved pipeline are recomputed.

Every sort of block has its steps from no recomputation to most: the corners of the hull of bytes
freed and seconds. A step in a chunk is priced by its seconds per byte that it frees at most, with
all micro-batches that can be alive in the chunk. Steps are taken in this order (ties: in the order
of chunks), each block by block from the front of the chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.block_cost import FULL
from autopar.cost.setting import Setting
from autopar.search import knapsack
from autopar.search.chain import Chain, Floats, Ints
from autopar.search.columns import Way, ways_of
from autopar.search.moment_tables import interval_moments


@dataclass(frozen=True)
class Step:
    """Blocks of a sort are recomputed in this `way`, instead of the step before it: the bytes that
    this frees more, and the seconds that it adds more, per micro-batch."""

    way: Way
    gain: int
    extra: float

    @property
    def sort(self) -> int:
        return self.way.sort


@dataclass(frozen=True)
class Priced:
    """Steps in the order of their price: of each its chunk, the sort of its blocks, and for one of
    these the bytes that it frees in one backward, and the seconds that it adds to a micro-batch."""

    chunk: Ints
    sort: Ints
    freed: Floats
    extra: Floats


class Recomputation:
    """What may be recomputed under one setting: `auto`, `selective` (no block whole), `none`, or
    `full` (all blocks whole: its steps are taken all at once)."""

    def __init__(self, chain: Chain, setting: Setting, recompute: str) -> None:
        kinds = interval_moments(chain, setting).kinds
        self.full = recompute == "full"
        self.ways = [
            way
            for way in ways_of(chain, setting, kinds)
            if recompute == "auto"
            or (recompute == "full" and way.label == FULL)
            or (recompute == "selective" and way.label != FULL)
        ]
        self.steps: list[Step] = []
        self._ratios: list[float] = []
        self._priced: dict[tuple[int, ...], Priced] = {}
        if self.full:
            self.steps = [Step(way, way.gain, way.extra) for way in self.ways]
            self._ratios = [0.0] * len(self.steps)
            return
        items = knapsack.items_of(self.ways, lambda way: np.array(kinds[way.kind][1]))
        known = {(way.sort, way.label): way for way in self.ways}
        for found in knapsack.increments(items, range(len(items))):
            way = known[found.sort, items.labels[found.item]]
            self.steps.append(Step(way, found.gain, found.extra))
            self._ratios.append(found.ratio)

    def in_order(self, most: Ints) -> list[tuple[int, Step]]:
        """(chunk, step) of a rank with `most` micro-batches alive in each chunk."""
        priced = [
            (ratio / alive, chunk, number)
            for chunk, alive in enumerate(most.tolist())
            if alive
            for number, ratio in enumerate(self._ratios)
        ]
        return [(chunk, self.steps[number]) for _, chunk, number in sorted(priced)]

    def priced(self, live: Ints) -> Priced:
        """`in_order`, where so many micro-batches are alive."""
        key = tuple(live.tolist())
        if key not in self._priced:
            order = self.in_order(live)
            self._priced[key] = Priced(
                np.array([chunk for chunk, _ in order], np.int64),
                np.array([step.sort for _, step in order], np.int64),
                np.array([float(step.gain * live[chunk]) for chunk, step in order]),
                np.array([step.extra for _, step in order], np.float64),
            )
        return self._priced[key]
