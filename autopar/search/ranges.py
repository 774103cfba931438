"""The largest value of any range of a sequence, for many ranges at once."""

from __future__ import annotations

import numpy as np

from autopar.search.chain import Ints


class RangeMaximum:
    """Tables of all ranges whose length is a power of two: any range is two of them."""

    def __init__(self, values: Ints) -> None:
        self.values = values
        self._positions = [np.arange(len(values))]
        width = 1
        while 2 * width <= len(values):
            one, two = self._positions[-1][:-width], self._positions[-1][width:]
            self._positions.append(np.where(values[one] >= values[two], one, two))
            width *= 2

    def position(self, start: Ints, stop: Ints) -> Ints:
        """Where the largest of `values[start:stop]` is; ranges may not be empty."""
        level = np.frexp(stop - start)[1] - 1  # floor of the binary logarithm
        found = np.empty(start.shape, np.int64)
        for k in np.unique(level):
            mine = level == k
            table = self._positions[k]
            one, two = table[start[mine]], table[stop[mine] - (1 << int(k))]
            found[mine] = np.where(self.values[one] >= self.values[two], one, two)
        return found

    def __call__(self, start: Ints, stop: Ints) -> Ints:
        """The largest of `values[start:stop]`; 0 where the range is empty (values are >= 0)."""
        some = stop > start
        if some.all():
            return np.asarray(self.values[self.position(start, stop)])
        found = np.zeros(start.shape, np.int64)
        found[some] = self.values[self.position(start[some], stop[some])]
        return found

    def second(self, start: Ints, stop: Ints) -> Ints:
        """The second largest, 0 where there is none; ranges may not be empty."""
        at = self.position(start, stop)
        return np.asarray(np.maximum(self(start, at), self(at + 1, stop)))
