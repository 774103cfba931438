"""Bytes of all intervals of blocks at their fullest moments: tables of `cost.fullest_moment`.

For a stage with blocks a .. b-1, of which R are recomputed and free g bytes per micro-batch:

    bytes = max over its phases, with k micro-batches in flight, of
        fixed + (k - 1) (flight - g) + max(min(floor + flight - g, plain), again(R) + flight - g)
    and no less than scratch

where again(R) is the largest over the kinds of blocks in R. So a stage fits in a limit exactly when
g is at least what the first part needs (`needs`) and, for each kind in R, what it needs: thresholds
in bytes per micro-batch, which is what a knapsack can be asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopar.block_cost import BlockCost, Held, tie_groups
from autopar.cost import block_moment, memory
from autopar.cost.fullest_moment import kind_of
from autopar.cost.setting import Phase, Setting
from autopar.search.any_chunks import AnyChunks
from autopar.search.band import Band
from autopar.search.busiest_block import BusiestBlock, at_end, inside
from autopar.search.chain import (
    NONE,
    Chain,
    Ints,
    interval_max,
    interval_sum,
    sums_before,
)

# More than any bytes: a need that nothing meets.
NEVER = 2**60


@dataclass(frozen=True)
class Moments:
    """Of one sort of backward: the fullest moment with nothing recomputed (`plain`), and over what
    all blocks keep, with all of it recomputed: without (`floor`) and with what a kind rebuilds
    (`again`, [kinds, n, n + 1]; it is made when it is asked for: bounds need none)."""

    plain: Ints
    floor: Ints
    make_again: Callable[[Band | None], Ints]

    @cached_property
    def again(self) -> Ints:
        return self.make_again(None)

    def within(self, band: Band) -> Moments:
        """Of the intervals of a band, none of its parts."""
        return Moments(band(self.plain), band(self.floor), lambda _: self.make_again(band))


class IntervalMoments:
    """Bytes per interval, whatever its place in a pipeline: `fixed`, and `flight` per micro-batch
    in flight without recomputation; `gradients` once they are all there; `scratch` of the end of
    the step (all that is alive in it); `given_back` by the last backward, of an interval that is
    not the only one of its rank. `received`, by its first block, and `sent`, by its end: what
    passes its borders. `least`: bytes that each block keeps at least per micro-batch. `kinds`:
    bytes that a kind of recomputation frees per micro-batch in flight, and bytes that it
    rebuilds; `again_kept`: of shared values what each micro-batch in flight keeps besides, if
    anything is recomputed."""

    def __init__(self, chain: Chain, setting: Setting) -> None:
        build = _Builder(chain, setting)
        states = build.once(memory.optimizer_bytes)
        parameters = build.once(memory.parameter_bytes)
        for group, rooted in build.rooted.items():
            tied = chain.tied(group, lambda t: memory.tied_gathered_bytes(t.parameters, setting))
            parameters = parameters + np.where(rooted, interval_max(tied), 0)
        end = build.once(block_moment.end_parameter_bytes)
        end = end + build.once(block_moment.end_gradient_bytes)
        fixed = parameters + states + build.once(memory.bucket_bytes)
        for group, rooted in build.rooted.items():
            # Some other stage has the last holder: here the last one leaves its gradients.
            last = interval_sum(chain.tied(group, lambda t: int(t.last and t.parameters > 0)))
            left = chain.tied(group, lambda t: t.trainable * setting.bytes.compute)
            fixed = fixed + np.where(rooted & (last == 0), interval_max(left), 0)
        self.fixed: Ints = fixed + setting.practice.bucket_bytes
        self.flight: Ints = build.flight
        self.gradients: Ints = build.once(memory.gradient_bytes)
        in_turn = interval_max(chain.ints(lambda b: memory.in_turn_bytes(b, setting)))
        self.scratch: Ints = end + states + np.maximum(build.once(memory.scratch_bytes), in_turn)
        gone = chain.ints(lambda b: block_moment.given_back_bytes(b, setting))
        self.given_back: Ints = interval_sum(gone)
        self.received: Ints = build.received
        self.sent: Ints = build.sent
        self.least: Ints = chain.ints(lambda b: b.least_kept)
        self.passing: Ints = build.passing
        self.again_kept: Ints = build.again_kept
        self.kinds = tuple(build.kinds)
        self._build = build

    @cached_property
    def can(self) -> NDArray[np.bool_]:
        """[kind, block]: which blocks could be recomputed in a way of a kind."""
        found = [self._build.can(kind) for kind in self.kinds]
        return np.stack(found) if found else np.zeros((0, len(self._build.chain)), bool)

    def inside(self, rooted: Collection[str], *, alone: bool) -> Ints:
        """What each block works with, beside the reduction of the one after it or `alone`."""
        return inside(self._build.chain, self._build.setting, rooted, alone=alone)

    def at_end(self, first: bool, rooted: Collection[str], *, alone: bool) -> Ints:
        """What there is of each block as its backward ends, over what it saved; `alone` as for
        `inside`."""
        return at_end(self._build.chain, self._build.setting, first, rooted, alone=alone)

    def rooted(self, start: int, stop: int) -> tuple[str, ...]:
        """The groups of tied parameters that several blocks of an interval hold."""
        return tuple(g for g, where in self._build.rooted.items() if where[start, stop])

    def throughout(self, first: bool, start: int, stop: int) -> int:
        """What is there at all moments of a backward, beside what `_Builder` counts by block: the
        gradients, and the one that the backward before sent away."""
        if not first:
            return int(self.gradients[start, stop]) + int(self.received[start])
        ready = bool(self._build.setting.practice.gradient_buffer)
        return int(self.gradients[start, stop]) if ready else 0

    @cached_property
    def first(self) -> Moments:
        """Of the first backward of a step."""
        ready = bool(self._build.setting.practice.gradient_buffer)
        return self._build.moments(True, self.gradients if ready else np.int64(0))

    @cached_property
    def later(self) -> Moments:
        """Of the backwards after it."""
        return self._build.moments(False, self.gradients)

    def of(self, *, first: bool) -> Moments:
        return self.first if first else self.later

    def within(self, band: Band, used: Collection[bool]) -> IntervalMoments:
        """Of the intervals of a band. `used`: whether first backwards, later ones, or both are
        asked for."""
        found = copy(self)
        for name in ("fixed", "flight", "gradients", "scratch", "again_kept"):
            setattr(found, name, band(getattr(self, name)))
        for first in used:
            setattr(found, "first" if first else "later", self.of(first=first).within(band))
        return found


def _fuller(one: Moments, other: Moments) -> Moments:
    """The larger of two in every interval."""
    return Moments(
        np.maximum(one.plain, other.plain),
        np.maximum(one.floor, other.floor),
        lambda band: np.maximum(one.make_again(band), other.make_again(band)),
    )


def _either(where: NDArray[np.bool_], one: Moments, other: Moments) -> Moments:
    """`one` in the intervals `where` it holds, elsewhere the `other`."""
    return Moments(
        np.where(where, one.plain, other.plain),
        np.where(where, one.floor, other.floor),
        lambda band: np.where(
            where if band is None else band(where), one.make_again(band), other.make_again(band)
        ),
    )


@lru_cache(maxsize=8)
def _interval_moments(chain: Chain, key: AnyChunks) -> IntervalMoments:
    return IntervalMoments(chain, key.setting)


def interval_moments(chain: Chain, setting: Setting) -> IntervalMoments:
    """Tables of all intervals under `setting`, whatever its schedule."""
    return _interval_moments(chain, AnyChunks(setting))


@dataclass(frozen=True)
class MomentTables:
    """Bytes of all intervals as stages of a pipeline: per stage its `phases`."""

    intervals: IntervalMoments
    phases: tuple[tuple[Phase, ...], ...]

    @property
    def fixed(self) -> Ints:
        return self.intervals.fixed

    @property
    def flight(self) -> Ints:
        return self.intervals.flight

    @property
    def scratch(self) -> Ints:
        return self.intervals.scratch

    @property
    def kinds(self) -> tuple[tuple[int, int], ...]:
        return self.intervals.kinds

    def moments(self, phase: Phase) -> Moments:
        return self.intervals.of(first=phase.first)

    def within(self, band: Band) -> MomentTables:
        """Of the intervals of a band."""
        used = {phase.first for stage in self.phases for phase in stage}
        return replace(self, intervals=self.intervals.within(band, used))

    def needs(self, stage: int, limit: int, rows: slice = slice(None)) -> tuple[Ints, Ints]:
        """Bytes per micro-batch that recomputation has to free for `limit`, and those for each
        kind among the recomputed ([kinds, ...]): none at all when the first are not above 0. Of
        the intervals in some `rows` of the tables."""
        flight = self.flight[rows]
        least = np.full(flight.shape, NONE, np.int64)
        each = np.full((len(self.kinds), *flight.shape), NONE, np.int64)
        room = limit - self.fixed[rows]
        for phase in self.phases[stage]:
            k, found = phase.in_flight, self.moments(phase)
            all_kept = k * flight - room
            some = -(-(all_kept + found.floor[rows]) // k)
            over = all_kept - flight + found.plain[rows]
            plain = -(-over // (k - 1)) if k > 1 else np.where(over <= 0, NONE, NEVER)
            least = np.maximum(least, np.minimum(some, plain))
            again = found.again[:, rows]
            asked = -(-(all_kept + again) // k)
            each = np.maximum(each, np.where(again > NONE // 2, asked, NONE))
        more = self.intervals.again_kept[rows]
        return np.where(least > 0, least + more, least), each + more

    def peak(self, stage: int, start: int, stop: int, recompute: Sequence[int]) -> int:
        """Bytes of one stage whose recomputed blocks are so in these kinds."""
        at = (start, stop)
        flight = int(self.flight[at]) - sum(self.kinds[k][0] for k in recompute)
        flight += int(self.intervals.again_kept[at]) if recompute else 0
        most = int(self.scratch[at])
        for phase in self.phases[stage]:
            found = self.moments(phase)
            again = max((int(found.again[k][at]) for k in set(recompute)), default=NONE)
            fullest = max(min(flight + int(found.floor[at]), int(found.plain[at])), flight + again)
            most = max(most, int(self.fixed[at]) + (phase.in_flight - 1) * flight + fullest)
        return most

    def peaks(self, stage: int, gain: Ints, kinds: NDArray[np.bool_]) -> Ints:
        """Bytes of every interval with blocks recomputed that free `gain` and are of `kinds`
        ([kinds, n, n + 1])."""
        again_kept = np.where(kinds.any(axis=0), self.intervals.again_kept, 0)
        flight, most = self.flight - gain + again_kept, self.scratch
        for phase in self.phases[stage]:
            found = self.moments(phase)
            again = np.where(kinds, found.again, NONE).max(axis=0, initial=NONE)
            fullest = np.maximum(np.minimum(flight + found.floor, found.plain), flight + again)
            most = np.maximum(most, self.fixed + (phase.in_flight - 1) * flight + fullest)
        return np.asarray(most)


def moment_tables(chain: Chain, setting: Setting) -> MomentTables:
    """Tables of all intervals under `setting`, as stages."""
    phases = tuple(setting.phases(i) for i in range(setting.mesh.pp))
    return MomentTables(interval_moments(chain, setting), phases)


class _Builder:
    def __init__(self, chain: Chain, setting: Setting) -> None:
        self.chain, self.setting = chain, setting
        boundary = chain.ints(lambda b: b.boundary_bytes)
        self.received = np.concatenate([np.zeros(1, np.int64), boundary[:-1]])
        # By the end of an interval: what it sends.
        self.sent = np.concatenate([np.zeros(1, np.int64), boundary])
        self.sent[-1] = 0
        self.saved = chain.ints(lambda b: b.saved_bytes)
        own = chain.ints(lambda b: min(b.saved_input_bytes, b.input_bytes))
        self.passing = np.maximum(0, self.received - own)[:, None] + self.sent[None, :]
        shared = self._shared(lambda b: b.shared_kept_bytes)
        self.passing = self.passing + shared
        self.again_kept = self._shared(lambda b: b.shared_bytes) - shared
        # Where several blocks hold the parameters of a group.
        self.rooted = {
            group: interval_sum(chain.tied(group, lambda t: int(t.parameters > 0))) > 1
            for group in tie_groups(chain.blocks)
        }
        self.flight = interval_sum(self.saved) + self.passing
        # In the order of the chain, so that equal chains have equal tables.
        self.kinds = list(dict.fromkeys(kind_of(b, o) for b in chain.distinct for o in b.options))

    def _shared(self, term: Callable[[BlockCost], int]) -> Ints:
        """A term of shared values, once where several blocks read the same ones."""

        def own(key: str) -> Ints:
            return self.chain.ints(lambda b: term(b) if b.shared_key == key else 0)

        found = interval_sum(own(""))
        for key in sorted({b.shared_key for b in self.chain.distinct} - {""}):
            found = found + interval_max(own(key))
        return np.asarray(found)

    def once(self, term: Callable[[Held, Setting], int]) -> Ints:
        """A term over all blocks; parameters that several of them tie count once."""

        def own(held: Held) -> int:
            return term(held, self.setting)

        total = interval_sum(self.chain.ints(own))
        for group in self.rooted:
            same = self.chain.tied(group, own)
            total = total - (interval_sum(same) - interval_max(same))
        return np.asarray(total)

    def moments(self, first: bool, gradients: Ints | np.int64) -> Moments:
        """Tables of a backward. `gradients`: those that are there throughout; in the first
        backward there are those of the blocks behind."""
        found = self._moments(first, gradients, rooted=())
        for groups, where in self._rooted_together():
            other = self._moments(first, gradients, rooted=groups)
            found = _either(where, other, found)
        return found

    def _rooted_together(self) -> Iterator[tuple[tuple[str, ...], NDArray[np.bool_]]]:
        """The sets of groups that are rooted in some interval, but none, and in which."""
        number = np.zeros(self.flight.shape, np.int64)
        for rooted in self.rooted.values():
            # Numbered anew each time, so that they stay small.
            number = np.unique(2 * number + rooted, return_inverse=True)[1].reshape(number.shape)
        for value in range(int(number.max(initial=0)) + 1):
            where = number == value
            groups = tuple(g for g, rooted in self.rooted.items() if rooted[where].all())
            if groups:
                yield groups, where

    def _moments(
        self, first: bool, gradients: Ints | np.int64, *, rooted: Collection[str]
    ) -> Moments:
        chain, setting = self.chain, self.setting
        constant = gradients + (0 if first else self.received[:, None])
        both: tuple[str, ...] = ("forward", "backward")
        resharded = chain.ints(
            lambda b: block_moment.resharded_bytes(b, setting, first=first, rooted=rooted)
        )
        apart = block_moment.gives_back(setting, first=first)
        if apart:
            # In the only forward what blocks behind gather is not there yet, in a later one it is.
            forward = self._busiest(first, rooted, both[:1])
            ungathered = sums_before(-resharded if first else 0 * resharded)
            both = both[1:]
        made = chain.ints(lambda b: block_moment.left_bytes(b, setting, rooted=rooted))
        made = made - resharded
        if first:
            made = made + chain.ints(lambda b: block_moment.made_bytes(b, setting, rooted=rooted))
        behind = sums_before(made)
        backward = self._busiest(first, rooted, both)
        found = self._with(backward, behind, constant)
        return _fuller(found, self._with(forward, ungathered, constant)) if apart else found

    def _busiest(
        self, first: bool, rooted: Collection[str], parts: tuple[str, ...]
    ) -> BusiestBlock:
        return BusiestBlock(
            self.chain, self.setting, self.sent, first=first, rooted=rooted, parts=parts
        )

    def _with(
        self, busiest: BusiestBlock, behind: Ints, constant: Ints | np.integer[Any]
    ) -> Moments:
        """`behind`: sums of what blocks have made, and have not given back, by their number."""
        least = self.chain.ints(lambda b: b.least_kept)
        kept, given_back = sums_before(self.saved), sums_before(least) - behind
        # What the blocks behind have made, and (in `floor`) what they have given back.
        made_here = behind[None, :]
        plain = busiest.everywhere(kept[1:] - behind[1:])
        plain = plain - kept[:-1, None] + made_here + self.passing + constant
        end = constant - given_back[None, :]
        floor = busiest.everywhere(given_back[1:]) + end

        def again(band: Band | None) -> Ints:
            beside = [
                (np.where(self.can(kind), given_back[1:] + kind[1], NONE), kind[1])
                for kind in self.kinds
            ]
            if band is None:
                found = [busiest.everywhere(*some) + end for some in beside]
                return np.array(found, np.int64).reshape(-1, *self.flight.shape)
            there = band(np.broadcast_to(end, self.flight.shape))
            found = [busiest.within(some, band, more) + there for some, more in beside]
            return np.array(found, np.int64).reshape(-1, *there.shape)

        return Moments(np.asarray(plain), np.asarray(floor), again)

    def can(self, kind: tuple[int, int]) -> NDArray[np.bool_]:
        """Which blocks could be recomputed in a way of this kind."""
        return self.chain.ints(lambda b: any(kind_of(b, o) == kind for o in b.options)) > 0
