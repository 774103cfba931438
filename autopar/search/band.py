"""Intervals of a chain by their last block and their length, up to some length.

A band has shape [n, most]: entry [e, k] is of the k + 1 blocks that end with block e.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bound=np.generic)


class Band:
    """Intervals of up to `most` of n `blocks`. `start` and `stop`: where they begin and end;
    `some`: which of them there are (others begin before the chain, and are read from its start).
    """

    def __init__(self, blocks: int, most: int) -> None:
        self.most = most
        last, length = np.arange(blocks)[:, None], np.arange(most)[None, :]
        self.some = last >= length
        self.start = np.where(self.some, last - length, 0)
        self.stop = np.broadcast_to(last + 1, self.start.shape)

    def __call__(self, table: NDArray[T]) -> NDArray[T]:
        """The band of a table of all intervals, [..., n, n + 1] by first block and end."""
        return np.asarray(table[..., self.start, self.stop])
