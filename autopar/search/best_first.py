"""The queue of the outer search: by lower bound, until none can be better.

A configuration enters the queue with the bound of the provider's optimistic prices, comes back with
the bound of its real prices, one entry per placement alternative, and is solved exactly (`stages`)
when it is still first. Everything left in the queue when the best plan meets the smallest bound is
proven no better. Among equal plans the simpler one wins: lower ZeRO level, no sequence-parallel
boundary, smaller tp, smaller pp, larger micro-batch.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.block_cost import ChainCost, CostProvider
from autopar.cost.setting import Setting
from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.search import columns, stages
from autopar.search.bounds import bound
from autopar.search.options import SearchOptions, stage_starts
from autopar.search.result import Choice

TIE = 1e-9
# How many configurations are solved only to name the runners-up.
OTHER_SOLVES = 60
# and for how many of them the provider is asked for prices that the search did not need.
OTHER_WAITS = 4
Tie = tuple[int, bool, int, int, int, int]


@dataclass(frozen=True)
class Progress:
    """Where the search stands; handed to the `progress` callback now and then."""

    explored: int
    waiting: int
    best_seconds: float | None
    bound_seconds: float


class Prices:
    """The provider's chains, indexed once, and the time spent waiting for them."""

    def __init__(self, provider: CostProvider, boundary: str | None) -> None:
        self.provider = provider
        self.boundary = boundary
        self.seconds = 0.0
        self._chains: dict[tuple[int, int], list[tuple[ChainCost, columns.Chain]]] = {}
        self._optimistic: dict[tuple[int, int], columns.Chain] = {}

    def chains(self, setting: Setting) -> list[tuple[ChainCost, columns.Chain]]:
        """Alternatives for the tp degree and micro-batch size of `setting`, as pinned."""
        return [c for c in self.every(setting) if self.boundary in (None, c[0].boundary)]

    def every(self, setting: Setting) -> list[tuple[ChainCost, columns.Chain]]:
        """All placement alternatives for the tp degree and micro-batch size of `setting`."""
        key = (setting.mesh.tp, setting.microbatch)
        if key not in self._chains:
            begin = time.perf_counter()
            found = self.provider.chains(*key)
            self.seconds += time.perf_counter() - begin
            self._chains[key] = [(c, columns.Chain(c.blocks)) for c in found]
        return self._chains[key]

    def check_boundary(self) -> None:
        """Raise `UsageError` when no alternative seen has the pinned boundary."""
        seen = sorted({c.boundary for found in self._chains.values() for c, _ in found})
        if self.boundary is not None and seen and self.boundary not in seen:
            raise UsageError(
                f"boundary={self.boundary} is not a placement between the blocks of this model",
                next_step=f"choose one of {', '.join(seen)}",
            )

    def known(self, setting: Setting) -> bool:
        """Whether `chains` answers at once."""
        return (setting.mesh.tp, setting.microbatch) in self._chains

    def optimistic(self, setting: Setting) -> columns.Chain:
        """Lower bounds of all alternatives."""
        key = (setting.mesh.tp, setting.microbatch)
        if key not in self._optimistic:
            begin = time.perf_counter()
            self._optimistic[key] = columns.Chain(self.provider.optimistic(*key).blocks)
            self.seconds += time.perf_counter() - begin
        return self._optimistic[key]


@dataclass(order=True)
class _Entry:
    """A configuration in the queue; `alternative` is -1 until its real prices are known."""

    bound: float
    tie: Tie
    index: int
    alternative: int


class BestFirst:
    """State of one best-first search."""

    def __init__(
        self, prices: Prices, found: Sequence[Setting], options: SearchOptions, limit: int
    ) -> None:
        self.prices, self.settings, self.limit = prices, found, limit
        pins = options.pins
        self.recompute = pins.recompute or "auto"
        self.starts = stage_starts(pins, prices.provider.block_names)
        self.best: Choice | None = None
        self.best_tie: Tie | None = None
        self.solved: dict[tuple[int, int], Choice] = {}
        self.solved_meshes: set[Mesh] = set()
        self.count: Counter[str] = Counter()
        self.queue: list[_Entry] = []
        self.queue_left = False
        for index, setting in enumerate(found):
            self._push(prices.optimistic(setting), index, -1, sequence_parallel=False)

    def _push(
        self, chain: columns.Chain, index: int, alternative: int, *, sequence_parallel: bool
    ) -> None:
        setting = self.settings[index]
        least = bound(chain, setting)
        if least.peak > self.limit:
            self.count["pruned by memory floor"] += 1
            return
        mesh = setting.mesh
        tie = (setting.zero, sequence_parallel, mesh.tp, mesh.pp, -setting.microbatch, alternative)
        heapq.heappush(self.queue, _Entry(least.seconds, tie, index, alternative))

    def run(self, deadline: float | None, progress: Callable[[Progress], None] | None) -> float:
        """Search until proven or `deadline`; returns the lower bound (`inf`: nothing fits)."""
        explored = 0
        while self.queue:
            first = self.queue[0]
            best = self.best.step_seconds if self.best else float("inf")
            if first.bound > best * (1 + TIE):
                break
            late = deadline is not None and time.perf_counter() > deadline
            if late and self.best:
                self.queue_left = True
                return min(best, first.bound)
            heapq.heappop(self.queue)
            explored += 1
            if progress and explored % 10 == 1:
                seconds = best if self.best else None
                progress(Progress(explored, len(self.queue), seconds, first.bound))
            self._step(first, best)
        self.count["pruned by time bound"] += len(self.queue)
        return self.best.step_seconds if self.best else float("inf")

    def _step(self, entry: _Entry, best: float) -> None:
        """Price or solve the entry with the lowest bound."""
        if entry.bound >= best * (1 - TIE) and self.best_tie and entry.tie >= self.best_tie:
            self.count["no simpler at equal time"] += 1
            return
        setting = self.settings[entry.index]
        if entry.alternative < 0:
            self._expand(entry.index)
            return
        found = self.solve(entry.index, entry.alternative, best * (1 + TIE))
        self.count["solved"] += 1
        self.solved_meshes.add(setting.mesh)
        if found is None:
            return
        better = found.step_seconds < best * (1 - TIE)
        equal = found.step_seconds <= best * (1 + TIE)
        if better or (equal and (self.best_tie is None or entry.tie < self.best_tie)):
            self.best, self.best_tie = found, entry.tie

    def _expand(self, index: int) -> None:
        """Queue every placement alternative of a configuration under its real prices."""
        for number, (cost, chain) in enumerate(self.prices.chains(self.settings[index])):
            self._push(chain, index, number, sequence_parallel=cost.boundary != "R")

    def solve(self, index: int, alternative: int, cutoff: float) -> Choice | None:
        """The best plan of one configuration, if it is below `cutoff` seconds."""
        setting = self.settings[index]
        cost, chain = self.prices.chains(setting)[alternative]
        found = stages.solve(
            columns.build(chain, setting),
            self.limit,
            recompute=self.recompute,
            starts=self.starts,
            cutoff=cutoff,
        )
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

        def keep(choice: Choice) -> None:
            old = known.get(choice.mesh)
            if old is None or choice.step_seconds < old.step_seconds:
                known[choice.mesh] = choice

        for choice in self.solved.values():
            keep(choice)
        solves = waits = 0
        while self.queue and solves < OTHER_SOLVES:
            entry = heapq.heappop(self.queue)
            ranked = sorted(c.step_seconds for m, c in known.items() if m != self.best.mesh)
            if len(ranked) >= wanted and entry.bound >= ranked[wanted - 1]:
                break
            setting = self.settings[entry.index]
            old = known.get(setting.mesh)
            if setting.mesh == self.best.mesh or (old and old.step_seconds <= entry.bound):
                continue
            if entry.alternative < 0:
                waits += not self.prices.known(setting)
                if waits <= OTHER_WAITS or self.prices.known(setting):
                    self._expand(entry.index)
                continue
            solves += 1
            cutoff = old.step_seconds if old else float("inf")
            found = self.solve(entry.index, entry.alternative, cutoff)
            if found is not None:
                keep(found)
        known.pop(self.best.mesh, None)
        return sorted(known.values(), key=lambda c: c.step_seconds)[:wanted]
