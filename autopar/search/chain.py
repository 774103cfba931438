"""A chain of blocks as arrays, and sums and maxima over all of its intervals.

Tables have shape [n, n + 1]: entry [a, b] is of blocks a .. b-1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cached_property
from operator import attrgetter
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.block_cost import BlockCost, Tied, tie_groups
from autopar.cost.step import BlockTimes
from autopar.search.keyed import Keyed

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Number = TypeVar("Number", np.float64, np.int64)
# The largest of no numbers: far below all bytes, and safe to add to.
NONE = -(2**60)
# All that prices of two blocks can differ in.
_price = attrgetter(*(f.name for f in fields(BlockCost) if f.name not in ("name", "kind")))


def sums_before(values: NDArray[Number]) -> NDArray[Number]:
    """[i] -> values[0] + ... + values[i - 1]."""
    return np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])


def interval_sum(values: NDArray[Number]) -> NDArray[Number]:
    """[a, b] -> values[a] + ... + values[b - 1]."""
    total = sums_before(values)
    return np.asarray(total[None, :] - total[:-1, None])


def interval_max(values: Ints, *, second: bool = False) -> Ints:
    """[a, b] -> the largest (or second largest, 0 if there is none) of values[a:b]; values >= 0."""
    n = len(values)
    upper = np.where(np.arange(n)[None, :] >= np.arange(n)[:, None], values[None, :], 0)
    largest = np.maximum.accumulate(upper, axis=1)
    if second:
        before = np.zeros_like(largest)
        before[:, 1:] = largest[:, :-1]
        largest = np.maximum.accumulate(np.minimum(before, upper), axis=1)
    table = np.zeros((n, n + 1), np.int64)
    table[:, 1:] = largest
    return table


def running_max(values: Ints) -> Ints:
    """[a, b] -> the largest of values[a:b], of any sign; `NONE` when there are none."""
    n = len(values)
    upper = np.where(np.arange(n)[None, :] >= np.arange(n)[:, None], values[None, :], NONE)
    table = np.full((n, n + 1), NONE, np.int64)
    table[:, 1:] = np.maximum.accumulate(upper, axis=1)
    return table


def counts_before(which: Ints) -> Ints:
    """[i, sort] -> how many of the first i blocks are of a sort; `which`: of each its sort."""
    one_hot = which[:, None] == np.arange(int(which.max()) + 1)[None, :]
    zero = np.zeros((1, one_hot.shape[1]), np.int64)
    return np.asarray(np.concatenate([zero, np.cumsum(one_hot, axis=0)]))


class Cutting(Keyed):
    """Where a chain may be cut, as a key: equal for chains that may be cut alike. Of each block:
    whether it can end a part (`ends`), and 1 where it has parameters (`holds`), or where it has
    some of a group of tied ones (`tied`)."""

    __slots__ = ("ends", "holds", "tied")

    def __init__(self, chain: Chain) -> None:
        self.ends = chain.ints(lambda b: int(b.can_end_stage)) > 0
        self.holds = chain.ints(lambda b: int(b.parameters > 0))
        self.tied = tuple(
            chain.tied(group, lambda t: int(t.parameters > 0)) for group in tie_groups(chain.blocks)
        )
        tables = (self.ends, self.holds, *self.tied)
        super().__init__(tuple(found.tobytes() for found in tables))

    def __len__(self) -> int:
        return len(self.ends)


class Chain:
    """The blocks of a chain with the distinct prices among them, so that each is computed once.

    `like`: the chain of the same blocks by whose prices cuts are balanced; itself if none is given.
    """

    def __init__(self, blocks: Sequence[BlockCost], like: Chain | None = None) -> None:
        self.blocks = tuple(blocks)
        self.like = like or self
        known: dict[tuple[object, ...], int] = {}
        self.distinct: list[BlockCost] = []
        which = []
        for block in self.blocks:
            key = _price(block)
            if key not in known:
                known[key] = len(self.distinct)
                self.distinct.append(block)
            which.append(known[key])
        self.which = np.array(which, np.int64)

    def __len__(self) -> int:
        return len(self.blocks)

    @cached_property
    def cutting(self) -> Cutting:
        return Cutting(self)

    def ints(self, get: Callable[[BlockCost], int]) -> Ints:
        """`get` of every block, in order."""
        return np.asarray(np.array([get(b) for b in self.distinct], np.int64)[self.which])

    def tied(self, group: str, get: Callable[[Tied], int]) -> Ints:
        """`get` of what every block holds of a group of tied parameters, in order."""
        return self.ints(lambda b: get(b.tied_as(group)))

    def seconds(self, times: Sequence[BlockTimes], get: Callable[[BlockTimes], float]) -> Floats:
        """`get` of every block's times, in order; `times` are those of `distinct`."""
        return np.asarray(np.array([get(t) for t in times], np.float64)[self.which])
