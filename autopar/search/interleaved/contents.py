"""Which intervals of a chain hold the same blocks in the same order, told without comparing them.

Every interval whose length is a power of two gets a number, the same for equal contents. Any
interval is two of these that overlap.
"""

from __future__ import annotations

import numpy as np

from autopar.search.chain import Ints


class Contents:
    """`which`: of each block its sort."""

    def __init__(self, which: Ints) -> None:
        self._numbers = [which]
        width = 1
        while 2 * width <= len(which):
            one, two = self._numbers[-1][:-width], self._numbers[-1][width:]
            pairs = one * (int(two.max()) + 1) + two
            self._numbers.append(np.unique(pairs, return_inverse=True)[1].astype(np.int64))
            width *= 2

    def __call__(self, start: Ints, stop: Ints) -> Ints:
        """[..., 3]: equal where the blocks from `start` to `stop` are; ranges may not be empty."""
        level = np.frexp(stop - start)[1] - 1  # floor of the binary logarithm
        found = np.empty((*start.shape, 3), np.int64)
        found[..., 0] = stop - start
        for k in np.unique(level):
            mine = level == k
            found[mine, 1] = self._numbers[k][start[mine]]
            found[mine, 2] = self._numbers[k][stop[mine] - (1 << int(k))]
        return found


def distinct(rows: Ints) -> tuple[Ints, Ints]:
    """The first of each distinct row of [rows, columns], and of which of these every row is one."""
    packed = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1] * rows.itemsize)))
    _, first, inverse = np.unique(packed.ravel(), return_index=True, return_inverse=True)
    return first, inverse
