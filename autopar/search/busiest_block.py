"""What the busiest block of an interval works with in a backward: of all intervals, or of a band.

The first block of a stage prefetches nothing, and behind the last one nothing is reduced nor any
gradient of the stage's results kept.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from autopar.cost import block_moment
from autopar.cost.setting import Setting
from autopar.search.band import Band
from autopar.search.chain import NONE, Chain, Ints


class BusiestBlock:
    """Of one sort of backward. `sent`: by the end of an interval, what it sends; `rooted`: groups
    of tied parameters that several blocks hold; `parts`: in the backward, in the forward before it,
    or both."""

    def __init__(
        self,
        chain: Chain,
        setting: Setting,
        sent: Ints,
        *,
        first: bool,
        rooted: Collection[str],
        parts: Collection[str] = ("forward", "backward"),
    ) -> None:
        self._sent, self._parts = sent, parts
        self._gathered = chain.ints(
            lambda b: block_moment.gathered_bytes(b, setting, rooted=rooted)
        )
        buffer = chain.ints(lambda b: block_moment.gather_buffer_bytes(b, setting, rooted=rooted))
        self._buffered = self._gathered + buffer
        self._working = chain.ints(block_moment.working_in_forward)
        self._fleeting = chain.ints(lambda b: b.fleeting_bytes)
        # Where a block is before it in the interval, as its parameters arrive.
        arrival = self._buffered - chain.ints(lambda b: b.saved_bytes)
        arrival[1:] += buffer[:-1]
        self._arrival = np.where(buffer > 0, arrival, NONE)
        self._before = np.concatenate([np.zeros(1, np.int64), self._gathered[:-1]])
        resharded = chain.ints(
            lambda b: block_moment.resharded_bytes(b, setting, first=first, rooted=rooted)
        )
        self._inner, self._last = (
            (
                inside(chain, setting, rooted, alone=alone),
                at_end(chain, setting, first, rooted, alone=alone)
                - resharded
                + (sent[1:] if alone else 0),
            )
            for alone in (False, True)
        )

    def _forward(self, rebuilt: int | None) -> Ints:
        if rebuilt is None:
            return self._buffered + self._working
        # `block_moment.working_in_first_forward`, less what is rebuilt.
        return self._buffered + np.minimum(self._fleeting - rebuilt, self._working)

    def _most(self, busy: tuple[Ints, Ints], beside: Ints, forward: Ints, *, alone: bool) -> Ints:
        """`alone`: no block of the interval is before it."""
        within, end = busy
        prefetched = 0 if alone else self._before
        found = np.full(len(beside), NONE, np.int64)
        if "backward" in self._parts:
            found = np.maximum(found, np.maximum(within + self._gathered, end) + prefetched)
        if "forward" in self._parts:
            found = np.maximum(found, forward)
            found = found if alone else np.maximum(found, self._arrival)
        return np.asarray(found + beside)

    def everywhere(self, beside: Ints, rebuilt: int | None = None) -> Ints:
        """[a, b] -> the most over the blocks, with what there is `beside` each; `rebuilt`: of it by
        a block that is recomputed."""
        n, forward = len(beside), self._forward(rebuilt)
        a, end = np.arange(n)[:, None], np.arange(n)[None, :]
        # The largest of those between: from a + 1 to a block.
        between = np.where(
            end > a, self._most(self._inner, beside, forward, alone=False)[None, :], NONE
        )
        np.maximum.accumulate(between, axis=1, out=between)
        most = between[:, :-1]
        np.maximum(most, self._most(self._inner, beside, forward, alone=True)[:, None], out=most)
        most += self._sent[None, 2:]
        np.maximum(most, self._most(self._last, beside, forward, alone=False)[None, 1:], out=most)
        table = np.full((n, n + 1), NONE, np.int64)
        np.copyto(table[:, 2:], most, where=end[:, :-1] >= a)
        table[np.arange(n), np.arange(1, n + 1)] = self._most(
            self._last, beside, forward, alone=True
        )
        return np.maximum(table, NONE, out=table)

    def within(self, beside: Ints, band: Band, rebuilt: int | None = None) -> Ints:
        """The same of the intervals of a band."""
        n, forward = len(beside), self._forward(rebuilt)
        last = np.arange(n)[:, None]
        found = np.empty((n, band.most), np.int64)
        found[:, 0] = self._most(self._last, beside, forward, alone=True)
        longer = self._most(self._inner, beside, forward, alone=True)[band.start[:, 1:]]
        if band.most > 2:
            back = last - 1 - np.arange(band.most - 2)[None, :]
            between = self._most(self._inner, beside, forward, alone=False)[np.maximum(back, 0)]
            between[back < 0] = NONE
            np.maximum.accumulate(between, axis=1, out=between)
            np.maximum(longer[:, 1:], between, out=longer[:, 1:])
        longer += self._sent[1:, None]
        np.maximum(
            longer, self._most(self._last, beside, forward, alone=False)[:, None], out=longer
        )
        found[:, 1:] = longer
        return np.maximum(found, NONE, out=found)


def inside(chain: Chain, setting: Setting, rooted: Collection[str], *, alone: bool) -> Ints:
    """What each block works with, beside the reduction of the one after it or `alone`."""
    return chain.ints(block_moment.inside_bytes) + _reduced(chain, setting, rooted, alone=alone)


def at_end(
    chain: Chain, setting: Setting, first: bool, rooted: Collection[str], *, alone: bool
) -> Ints:
    """What there is of each block as its backward ends, over what it saved; `alone` as before."""
    reduced = _reduced(chain, setting, rooted, alone=alone)
    found = chain.ints(lambda b: block_moment.at_end_bytes(b, setting, first=first, rooted=rooted))
    summed = chain.ints(lambda b: block_moment.summed_bytes(b, setting, rooted=rooted))
    found = np.maximum(found, np.where(summed > 0, summed + reduced, 0))
    return np.asarray(found - chain.ints(lambda b: b.saved_bytes))


def _reduced(chain: Chain, setting: Setting, rooted: Collection[str], *, alone: bool) -> Ints:
    """By block: the reduction of the one after it."""
    if alone:
        return np.zeros(len(chain), np.int64)
    found = chain.ints(lambda b: block_moment.handed_on_bytes(b, setting, rooted=rooted))
    return np.concatenate([found[1:], np.zeros(1, np.int64)])
