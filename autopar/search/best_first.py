"""The queue of the outer search: by lower bound, until none can be better.

A configuration enters the queue with the bound of the provider's optimistic prices. When it is
first, an interleaved one comes back with the bound over its family of cuts; then a configuration
comes back as one entry per placement alternative, with the bound of what their placement
costs; then with the bound of the full price; then, until here one entry for all numbers of ranks
that ZeRO may shard over, as one for each of them; and is solved exactly (`stages`) when it is still
first, but only for plans little above its bound: when there are none it comes back with what was
proven, to be solved for plans further above. Everything left in the queue when the best plan meets
the smallest bound is proven no better. Among equal plans the simpler one wins: lower ZeRO level, no
sequence-parallel boundary, no hybrid sharding, replicas as neighbours, smaller cp, smaller tp,
smaller pp, whole backwards, no V, fewer chunks, larger micro-batch.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from typing import Any

from autopar.cost.setting import Setting
from autopar.mesh import Mesh
from autopar.search import columns, gathered, interleaved, stages, zero_bubble
from autopar.search.bounds import bound, cut_seconds
from autopar.search.chain import Chain
from autopar.search.options import SearchOptions, stage_starts
from autopar.search.prices import Prices
from autopar.search.progress import Progress
from autopar.search.recompute_pin import recompute_mode
from autopar.search.reshard_pin import kept_gathered
from autopar.search.result import Choice
from autopar.search.shard_degrees import end_gain, families, undominated

TIE = 1e-9
# How many configurations are solved only to name the runners-up.
OTHER_SOLVES = 100
# and for how many of them the provider is asked for prices that the search did not need.
OTHER_WAITS = 4
# Plans of so much more than the bound are looked for first, and then of more and more; at last any.
NEAR, FURTHER, TRIES = 0.04, 2.0, 4
Tie = tuple[int, bool, int, bool, int, int, int, int, bool, bool, int, int, int]


class Stage(IntEnum):
    """What the bound of a queue entry rests on."""

    OPTIMISTIC = 0
    CUT = 1
    SKETCHED = 2
    ANY_SHARD = 3
    PRICED = 4


@dataclass(order=True)
class _Entry:
    """A configuration in the queue; `alternative` is -1 while the entry stands for all of them.
    Until it is priced it stands for all of `BestFirst.families[index]`."""

    bound: float
    tie: Tie
    index: int
    alternative: int
    stage: Stage
    tries: int = 0

    @property
    def target(self) -> float:
        """Plans below so many seconds are looked for."""
        more = NEAR * FURTHER**self.tries if self.tries < TRIES else float("inf")
        return self.bound * (1 + more)


def solve_stages(
    chain: Chain,
    setting: Setting,
    limit: float,
    recompute: str,
    starts: Sequence[int] | None,
    cutoff: float = float("inf"),
    kept: Collection[str] | None = None,
) -> stages.StageSolution | None:
    """The inner search of a setting: `stages`, or `interleaved` or `zero_bubble` where ranks hold
    chunks. `kept`: blocks that ZeRO-3 keeps gathered; None: they are chosen too (`gathered`)."""
    given: dict[str, Any] = {"recompute": recompute, "starts": starts, "cutoff": cutoff}
    if setting.divided:
        return zero_bubble.solve(chain, setting, limit, **given)
    if setting.in_turns:
        return interleaved.solve(chain, setting, limit, **given)
    if (kept is None or len(kept)) and setting.may_keep:
        return _solve_gathered(chain, setting, limit, kept, given)
    return stages.solve(columns.build(chain, setting), limit, **given)


def _solve_gathered(
    chain: Chain,
    setting: Setting,
    limit: float,
    kept: Collection[str] | None,
    given: dict[str, Any],
) -> stages.StageSolution | None:
    """`solve_stages` where some blocks are kept gathered."""
    if kept is not None and len(kept) == len(chain):
        found = stages.solve(columns.build(chain, setting.keeping), limit, **given)
        spans = pairwise(found.cuts) if found else ()
        return found and replace(found, kept=tuple(tuple(range(a, b)) for a, b in spans))
    if kept is not None:
        return gathered.solve(chain, setting, limit, kept=kept, **given)
    # Without any the search is fast, and cuts the one with them short.
    plain = stages.solve(columns.build(chain, setting), limit, **given)
    if plain is not None:
        given = {**given, "cutoff": plain.objective * (1 - TIE)}
    return gathered.solve(chain, setting, limit, **given) or plain


def keep_fastest(known: dict[Mesh, Choice], choice: Choice) -> None:
    """Note a plan, if it is the fastest of its mesh shape."""
    old = known.get(choice.mesh.shape)
    if old is None or choice.step_seconds < old.step_seconds:
        known[choice.mesh.shape] = choice


def fastest_others(known: Mapping[Mesh, Choice], own: Mesh, wanted: int) -> list[Choice]:
    """Those of other mesh shapes than one's own, fastest first."""
    others = (choice for mesh, choice in known.items() if mesh != own)
    return sorted(others, key=lambda c: c.step_seconds)[:wanted]


class BestFirst:
    """State of one best-first search."""

    def __init__(
        self, prices: Prices, found: Sequence[Setting], options: SearchOptions, limit: int
    ) -> None:
        self.prices, self.limit = prices, limit
        pins = options.pins
        self.recompute = recompute_mode(pins)
        self.free = self.recompute == "auto"
        self.boundary = pins.boundary
        self.starts = stage_starts(pins, prices.provider.block_names)
        self.kept = kept_gathered(pins, prices.provider.block_names)
        self.best: Choice | None = None
        self.best_tie: Tie | None = None
        self.solved: dict[tuple[int, int], Choice] = {}
        self.solved_meshes: set[Mesh] = set()
        self.count: Counter[str] = Counter()
        self.queue: list[_Entry] = []
        # Schedules in which parts take turns wait for a plan: there is one soon, to be returned if
        # the search is interrupted, and most of these can be left out at a glance.
        self.later: list[_Entry] = []
        self.queue_left = False
        self.interrupted = False
        self.settings: list[Setting] = []
        self.families: dict[int, tuple[int, ...]] = {}
        self.extend(found)

    def extend(self, found: Sequence[Setting]) -> None:
        """Queue more settings; a `run` after it takes up those as well."""
        first = len(self.settings)
        self.settings += found
        if self.queue:  # what an earlier run left is counted when the next one ends
            self.count["pruned by time bound"] -= len(self.queue)
        more = families(found)
        self.families |= {i + first: tuple(j + first for j in of) for i, of in more.items()}
        for index in more:
            chain = self.prices.optimistic(found[index])
            self._push(chain, index + first, -1, Stage.OPTIMISTIC)

    def _push(
        self, chain: Chain, index: int, alternative: int, stage: Stage, floor: float = 0.0
    ) -> None:
        """Queue an entry by what `chain` says of it; its bound is at least `floor`."""
        setting = self.settings[index]
        family = self.families[index] if stage is not Stage.PRICED else ()
        among = tuple(self.settings[i] for i in family)
        known: dict[str, Any] = {"among": among, "sums": stage is Stage.SKETCHED}
        if stage is Stage.SKETCHED:
            known["optimistic"] = self.prices.optimistic(setting)
        room = self.limit if self.kept is None or len(self.kept) else None
        priced = stage is Stage.PRICED
        least = bound(chain, setting, exact=priced, keeps_within=room, **known)
        if least.peak > self.limit:
            self.count["pruned by memory floor"] += 1
            return
        seconds = max(least.seconds, floor)
        best = self.best.step_seconds if self.best else float("inf")
        cut = setting.in_turns and stage is not Stage.OPTIMISTIC and self.starts is None
        if cut and seconds < best:
            exact = priced and (self.free or setting.divided)
            given = self.limit, best
            seconds = max(seconds, cut_seconds(chain, setting, *given, exact=exact, **known))
            if seconds == float("inf"):
                self.count["pruned by memory floor"] += 1
                return
        tie = self._tie(index, alternative)
        waits = setting.in_turns and stage is Stage.OPTIMISTIC
        queue = self.later if waits else self.queue
        heapq.heappush(queue, _Entry(seconds, tie, index, alternative, stage))

    def _tie(self, index: int, alternative: int) -> Tie:
        """Smaller for the simpler of two configurations."""
        setting = self.settings[index]
        mesh = setting.mesh
        split = alternative >= 0 and self.prices.boundary_of(setting, alternative) != "R"
        sizes = mesh.dp_replicate, mesh.stages_inside, mesh.cp, mesh.ep, mesh.tp, mesh.pp
        order = (setting.zero, split, *sizes, setting.divided, bool(setting.turns), setting.chunks)
        return (*order, -setting.microbatch, alternative)

    def run(self, deadline: float | None, progress: Callable[[Progress], None] | None) -> float:
        """Search until proven, `deadline` or Ctrl-C; returns the lower bound (`inf`: nothing fits).

        A `KeyboardInterrupt` before there is any plan, or a second one, is passed on.
        """
        explored = 0
        while self.queue or self.later:
            if self.later and (self.best or not self.queue):
                self.queue += self.later
                heapq.heapify(self.queue)
                self.later = []
            first = self.queue[0]
            best = self.best.step_seconds if self.best else float("inf")
            if first.bound > best * (1 + TIE):
                break
            late = deadline is not None and time.perf_counter() > deadline
            if (late or self.interrupted) and self.best:
                self.queue_left = True
                return min(best, first.bound)
            heapq.heappop(self.queue)
            explored += 1
            try:
                if progress and explored % 10 == 1:
                    progress(self._progress(explored, first))
                self._step(first, best)
            except KeyboardInterrupt:
                # What was being looked at is looked at again by none: its bound still counts.
                heapq.heappush(self.queue, first)
                if self.interrupted:
                    raise
                if progress:
                    progress(replace(self._progress(explored, first), interrupted=True))
                if self.best is None:
                    raise
                self.interrupted = True
        self.count["pruned by time bound"] += len(self.queue)
        return self.best.step_seconds if self.best else float("inf")

    @property
    def bound(self) -> float:
        """Nothing that was not looked at takes less."""
        return min((e.bound for e in (*self.queue[:1], *self.later[:1])), default=float("inf"))

    def give_up(self, best: Choice) -> float:
        """End with a plan that was found elsewhere; returns the lower bound."""
        self.best, self.interrupted, self.queue_left = best, True, True
        return min(best.step_seconds, self.bound)

    def _progress(self, explored: int, first: _Entry) -> Progress:
        best = self.best.step_seconds if self.best else None
        least = min(first.bound, self.bound)
        beaten = sum(e.bound > best for q in (self.queue, self.later) for e in q) if best else 0
        waiting = len(self.queue) + len(self.later) - beaten
        pruned = sum(count for reason, count in self.count.items() if reason.startswith("pruned"))
        return Progress(explored, waiting, best, least, pruned + beaten)

    def _step(self, entry: _Entry, best: float) -> None:
        """Price or solve the entry with the lowest bound."""
        if entry.bound >= best * (1 - TIE) and self.best_tie and entry.tie >= self.best_tie:
            self.count["no simpler at equal time"] += 1
            return
        if entry.stage is not Stage.PRICED:
            self._expand(entry)
            return
        found = self._near(entry, best * (1 + TIE))
        if entry.tries == 0:
            self.count["solved"] += 1
        self._offer(found, entry.index, entry.alternative)

    def _offer(self, found: Choice | None, index: int, alternative: int) -> None:
        """A configuration was solved: keep its plan if it is better than the best one, or as good
        and simpler."""
        self.solved_meshes.add(self.settings[index].mesh.shape)
        if found is None:
            return
        tie = self._tie(index, alternative)
        best = self.best.step_seconds if self.best else float("inf")
        better = found.step_seconds < best * (1 - TIE)
        equal = found.step_seconds <= best * (1 + TIE)
        if better or (equal and (self.best_tie is None or tie < self.best_tie)):
            self.best, self.best_tie = found, tie

    def _expand(self, entry: _Entry) -> None:
        """Learn more about an entry: which alternatives it stands for, or its full price."""
        setting = self.settings[entry.index]
        if entry.stage is Stage.OPTIMISTIC and setting.in_turns:
            self._push(self.prices.optimistic(setting), entry.index, -1, Stage.CUT, entry.bound)
            return
        if entry.stage < Stage.SKETCHED:
            for number in self.prices.alternatives(setting, self.boundary):
                sketch = self.prices.sketch(setting, number)
                self._push(sketch, entry.index, number, Stage.SKETCHED, entry.bound)
            return
        _, chain = self.prices.chain(setting, entry.alternative)
        family = self.families[entry.index]
        if entry.stage is Stage.SKETCHED and len(family) > 1:
            self._push(chain, entry.index, entry.alternative, Stage.ANY_SHARD, entry.bound)
            return
        first, *others = undominated(chain, self.settings, family)
        floor = self._floor_of_others(entry, chain, first, others)
        if floor is None:
            self._push(chain, first, entry.alternative, Stage.PRICED, entry.bound)
            floor = dict.fromkeys(others, entry.bound)
        for index, least in floor.items():
            self._push(chain, index, entry.alternative, Stage.PRICED, least)

    def _floor_of_others(
        self, entry: _Entry, chain: Chain, first: int, others: Sequence[int]
    ) -> dict[int, float] | None:
        """Solve the `first` of a family, and tell from it what the `others` take at least: those
        that may still be the best plan. None where that can't be told, and nothing was solved."""
        setting = self.settings[first]
        if not others or self.best is None or setting.zero != 1:
            return None
        best = self.best.step_seconds * (1 + TIE)
        gains = {i: end_gain(chain, setting, self.settings[i], best) for i in others}
        target = best + max(gains.values())
        if not setting.in_turns and target > entry.target:
            return None
        found = self.solve(first, entry.alternative, target)
        self.count["solved"] += 1
        self._offer(found, first, entry.alternative)
        if found is None:
            self.count["pruned by time bound"] += len(others)
            return {}
        return {i: max(entry.bound, found.step_seconds - gain) for i, gain in gains.items()}

    def _near(self, entry: _Entry, cutoff: float) -> Choice | None:
        """The best plan of an entry if it is below `cutoff` seconds and near its bound. Is it not
        near, the entry is queued again with a larger bound."""
        # Cuts of interleaved schedules are taken in the order of their bounds as it is.
        in_turns = self.settings[entry.index].in_turns
        target = float("inf") if in_turns else entry.target
        found = self.solve(entry.index, entry.alternative, min(target, cutoff))
        if found is None and target < cutoff:
            heapq.heappush(self.queue, replace(entry, bound=target, tries=entry.tries + 1))
        return found

    def solve(self, index: int, alternative: int, cutoff: float) -> Choice | None:
        """The best plan of one configuration, if it is below `cutoff` seconds."""
        setting = self.settings[index]
        cost, chain = self.prices.chain(setting, alternative)
        given = self.limit, self.recompute, self.starts, cutoff, self.kept
        found = solve_stages(chain, setting, *given)
        if found is None:
            return None
        choice = Choice.of(setting, cost, found)
        self.solved[index, alternative] = choice
        return choice

    def other_meshes(self, wanted: int) -> list[Choice]:
        """The best plans of other mesh shapes, fastest first.

        Goes on through the queue until no other shape can be among them, or `OTHER_SOLVES` more
        configurations were solved: then they are the best known, not the proven best.
        """
        if self.best is None or wanted < 1:
            return []
        known: dict[Mesh, Choice] = {}
        own = self.best.mesh.shape

        for choice in self.solved.values():
            keep_fastest(known, choice)
        solves = waits = 0
        while self.queue and solves < OTHER_SOLVES:
            entry = heapq.heappop(self.queue)
            ranked = sorted(c.step_seconds for m, c in known.items() if m != own)
            if len(ranked) >= wanted and entry.bound >= ranked[wanted - 1]:
                break
            setting = self.settings[entry.index]
            old = known.get(setting.mesh.shape)
            if setting.mesh.shape == own or (old and old.step_seconds <= entry.bound):
                continue
            if entry.stage is not Stage.PRICED:
                waits += not self.prices.known(setting)
                if waits <= OTHER_WAITS or self.prices.known(setting):
                    self._expand(entry)
                continue
            solves += 1
            cutoff = old.step_seconds if old else float("inf")
            if len(ranked) >= wanted:
                cutoff = min(cutoff, ranked[wanted - 1])
            found = self._near(entry, cutoff)
            if found is not None:
                keep_fastest(known, found)
        return fastest_others(known, own, wanted)
