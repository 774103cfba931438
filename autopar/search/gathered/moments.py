"""Bytes of one interval of blocks, some of them kept gathered: `search.moment_tables` for many sets
of kept blocks at once.

A set is a row of a mask over the blocks of the interval. A kept block adds its gathered parameters
throughout, and the moments of others have their own, and those of a block before them that is
prefetched.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost import block_moment
from autopar.cost.setting import Phase, Setting
from autopar.search.chain import NONE, Chain, Ints, sums_before
from autopar.search.moment_tables import NEVER, MomentTables

Masks = NDArray[np.bool_]


@dataclass(frozen=True)
class SetMoments:
    """`Moments` by set of kept blocks: [sets], [sets] and [kinds, sets]."""

    plain: Ints
    floor: Ints
    again: Ints


@dataclass(frozen=True)
class Needs:
    """By set of kept blocks: bytes per micro-batch that recomputation has to free, and those for
    each kind among the recomputed ([kinds, sets])."""

    least: Ints
    each: Ints


class ChainMoments:
    """What the moments of a chain's blocks are made of, with the parameters of `rooted` groups held
    by the root."""

    def __init__(self, chain: Chain, setting: Setting, tables: MomentTables) -> None:
        self.chain, self.setting, self.tables = chain, setting, tables
        intervals = tables.intervals
        self.saved_ahead = sums_before(chain.ints(lambda b: b.saved_bytes))
        self.least_ahead = sums_before(chain.ints(lambda b: b.least_kept))
        self.in_forward = chain.ints(block_moment.working_in_forward)
        self.rebuilt = np.array([rebuilt for _, rebuilt in tables.kinds], np.int64)
        forward = [_in_first_forward(chain, int(rebuilt)) for rebuilt in self.rebuilt]
        self.in_first_forward = np.array(forward, np.int64).reshape(-1, len(chain))
        self.can = intervals.can
        self._gathered: dict[frozenset[str], Ints] = {}
        self._made: dict[tuple[frozenset[str], bool], Ints] = {}
        self._inside: dict[frozenset[str], tuple[Ints, Ints]] = {}
        self._at_end: dict[tuple[frozenset[str], bool], tuple[Ints, Ints]] = {}

    def gathered(self, rooted: frozenset[str]) -> Ints:
        """Bytes that every block gathers."""
        if rooted not in self._gathered:
            self._gathered[rooted] = self.chain.ints(
                lambda b: block_moment.gathered_bytes(b, self.setting, rooted=rooted)
            )
        return self._gathered[rooted]

    def made_ahead(self, rooted: frozenset[str], first: bool) -> Ints:
        """What the blocks before each one leave, and in the `first` backward of a step the
        gradients that they make."""
        if (rooted, first) not in self._made:
            made = self.chain.ints(
                lambda b: block_moment.left_bytes(b, self.setting, rooted=rooted)
            )
            if first:
                made = made + self.chain.ints(
                    lambda b: block_moment.made_bytes(b, self.setting, rooted=rooted)
                )
            self._made[rooted, first] = sums_before(made)
        return self._made[rooted, first]

    def inside(self, rooted: frozenset[str]) -> tuple[Ints, Ints]:
        """What every block works with; and one that is the last of its stage."""
        if rooted not in self._inside:
            find = self.tables.intervals.inside
            self._inside[rooted] = find(rooted, alone=False), find(rooted, alone=True)
        return self._inside[rooted]

    def at_end(self, rooted: frozenset[str], first: bool) -> tuple[Ints, Ints]:
        """What there is of every block as its backward ends, over what it saved; and of one that is
        the last of its stage."""
        if (rooted, first) not in self._at_end:
            find = self.tables.intervals.at_end
            found = find(first, rooted, alone=False), find(first, rooted, alone=True)
            self._at_end[rooted, first] = found
        return self._at_end[rooted, first]


class StageMoments:
    """The blocks `start` .. `stop` - 1 as stage number `stage`, for every set of `kept` blocks
    ([sets, blocks])."""

    def __init__(self, of: ChainMoments, stage: int, start: int, stop: int, kept: Masks) -> None:
        self.of, self.start, self.stop = of, start, stop
        intervals = of.tables.intervals
        self.phases = of.tables.phases[stage]
        self.rooted = frozenset(intervals.rooted(start, stop))
        mine = of.gathered(self.rooted)[start:stop]
        self.flight = int(intervals.flight[start, stop])
        self.again_kept = int(intervals.again_kept[start, stop])
        self.scratch = int(intervals.scratch[start, stop])
        self.fixed: Ints = int(intervals.fixed[start, stop]) + kept @ mine
        self.gathered = np.where(kept, 0, mine[None, :])
        before = np.zeros_like(self.gathered)
        before[:, 1:] = self.gathered[:, :-1]
        self.prefetched = before
        last = _last_gathered(self.gathered)
        self.in_forward = np.where(kept, last, 2 * self.gathered)
        # As parameters arrive, the buffer that the block before had is there too.
        saved = of.saved_ahead[start + 1 : stop + 1] - of.saved_ahead[start:stop]
        buffer = np.where(kept, last, self.gathered)
        arriving = 2 * self.gathered - saved
        arriving[:, 1:] += buffer[:, :-1]
        self.arriving = np.where(self.gathered > 0, arriving, NONE)
        self._moments: dict[bool, SetMoments] = {}

    def moments(self, phase: Phase) -> SetMoments:
        """Of one backward."""
        if phase.first not in self._moments:
            self._moments[phase.first] = self._of(phase.first)
        return self._moments[phase.first]

    def _of(self, first: bool) -> SetMoments:
        of, a, b = self.of, self.start, self.stop
        intervals = of.tables.intervals
        constant = intervals.throughout(first, a, b)
        works, last_works = of.inside(self.rooted)
        inside = works[a:b].copy()
        inside[-1] = last_works[b - 1]
        ends, last_ends = of.at_end(self.rooted, first)
        end = ends[a:b].copy()
        end[-1] = last_ends[b - 1] + intervals.sent[b]
        backward = np.maximum(inside + self.gathered, end) + self.prefetched
        sent = np.full(b - a, intervals.sent[b], np.int64)
        sent[-1] = 0
        without = np.maximum(backward, self.arriving) + sent
        most = np.maximum(without, of.in_forward[a:b] + self.in_forward + sent)
        made = of.made_ahead(self.rooted, first)
        behind = made[b] - made[a + 1 : b + 1]
        saved = of.saved_ahead[a + 1 : b + 1] - of.saved_ahead[a]
        passing = int(intervals.passing[a, b])
        plain = (most + saved + behind).max(axis=1) + passing + constant
        returned = of.least_ahead[b] - of.least_ahead[a + 1 : b + 1] - behind
        floor = (most - returned).max(axis=1) + constant
        again = np.full((len(of.rebuilt), len(most)), NONE, np.int64)
        for kind, rebuilt in enumerate(of.rebuilt):
            can = of.can[kind, a:b]
            if can.any():
                forward = of.in_first_forward[kind, a:b] - rebuilt + self.in_forward + sent
                with_kind = np.maximum(without, forward) - returned
                again[kind] = with_kind[:, can].max(axis=1) + rebuilt + constant
        return SetMoments(plain, floor, again)

    def needs(self, limit: int) -> Needs:
        """What recomputation has to free for `limit` bytes."""
        least = np.full(len(self.fixed), NONE, np.int64)
        each = np.full((len(self.of.rebuilt), len(self.fixed)), NONE, np.int64)
        room = limit - self.fixed
        for phase in self.phases:
            k, found = phase.in_flight, self.moments(phase)
            all_kept = k * self.flight - room
            some = -(-(all_kept + found.floor) // k)
            over = all_kept - self.flight + found.plain
            plain = -(-over // (k - 1)) if k > 1 else np.where(over <= 0, NONE, NEVER)
            least = np.maximum(least, np.minimum(some, plain))
            asked = -(-(all_kept + found.again) // k)
            each = np.maximum(each, np.where(found.again > NONE // 2, asked, NONE))
        return Needs(np.where(least > 0, least + self.again_kept, least), each + self.again_kept)

    def peaks(self, freed: int | Ints, kinds: Collection[int]) -> Ints:
        """Bytes with blocks recomputed that free `freed` per micro-batch (by set, or all the same)
        and are of `kinds`."""
        flight = self.flight - freed + (self.again_kept if kinds else 0)
        most = np.full(len(self.fixed), self.scratch, np.int64)
        for phase in self.phases:
            found = self.moments(phase)
            again = found.again[sorted(kinds)].max(axis=0) if kinds else NONE
            fullest = np.maximum(np.minimum(flight + found.floor, found.plain), flight + again)
            most = np.maximum(most, self.fixed + (phase.in_flight - 1) * flight + fullest)
        return most


def _in_first_forward(chain: Chain, rebuilt: int) -> Ints:
    return chain.ints(lambda b: block_moment.working_in_first_forward(b, rebuilt))


def _last_gathered(gathered: Ints) -> Ints:
    """By set and block: of the last block up to this one that gathers anything."""
    some = np.where(gathered > 0, np.arange(gathered.shape[1])[None, :], 0)
    return np.take_along_axis(gathered, np.maximum.accumulate(some, axis=1), axis=1)
