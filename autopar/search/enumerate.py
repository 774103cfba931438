"""The outer search: configurations in the order of their lower bound, until none can be better.

A configuration enters the queue with the bound of the provider's optimistic prices, comes back with the
bound of its real prices, one entry per placement alternative, and is solved exactly (`stages`) when it is
still first. Everything left in the queue when the best plan meets the smallest bound is proven no
better. Among equal plans the simpler one wins: lower ZeRO level, no sequence-parallel boundary, smaller
tp, smaller pp, larger micro-batch.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autopar.block_cost import ChainCost, CostProvider
from autopar.cluster import Cluster
from autopar.cost.evaluate import assert_agrees, evaluate
from autopar.cost.setting import Setting
from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.search import columns, stages
from autopar.search.bounds import bound
from autopar.search.options import SearchOptions, check_pins, stage_starts
from autopar.search.result import Choice, SearchResult
from autopar.search.space import settings

TIE = 1e-9
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
        """Placement alternatives for the tp degree and micro-batch size of `setting`."""
        key = (setting.mesh.tp, setting.microbatch)
        if key not in self._chains:
            begin = time.perf_counter()
            every = self.provider.chains(*key)
            self.seconds += time.perf_counter() - begin
            kept = [c for c in every if self.boundary in (None, c.boundary)]
            self._chains[key] = [(c, columns.Chain(c.blocks)) for c in kept]
            if every and not kept:
                raise UsageError(
                    f"boundary={self.boundary} is not a placement between blocks with tp={key[0]}",
                    next_step=f"choose one of {', '.join(sorted({c.boundary for c in every}))}",
                )
        return self._chains[key]

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


class _Search:
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
        for index, setting in enumerate(found):
            self._push(prices.optimistic(setting), index, -1, sequence_parallel=False)
        heapq.heapify(self.queue)

    def _push(
        self, chain: columns.Chain, index: int, alternative: int, *, sequence_parallel: bool
    ) -> None:
        setting = self.settings[index]
        least = bound(chain, setting)
        if least.peak > self.limit:
            self.count["pruned by memory floor"] += 1
            return
        mesh = setting.mesh
        tie = (
            setting.zero, sequence_parallel, mesh.tp, mesh.pp, -setting.microbatch, alternative
        )
        heapq.heappush(self.queue, _Entry(least.seconds, tie, index, alternative))

    def run(self, deadline: float | None, progress: Callable[[Progress], None] | None) -> float:
        """Search until proven or `deadline`; returns the proven lower bound (`inf` if nothing fits)."""
        explored = 0
        while self.queue:
            first = self.queue[0]
            best = self.best.step_seconds if self.best else float("inf")
            if first.bound > best * (1 + TIE):
                break
            late = deadline is not None and time.perf_counter() > deadline
            if late and self.best:
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
        chains = self.prices.chains(setting)
        if entry.alternative < 0:
            for number, (cost, chain) in enumerate(chains):
                self._push(chain, entry.index, number, sequence_parallel=cost.boundary != "R")
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

    def solve(self, index: int, alternative: int, cutoff: float) -> Choice | None:
        """The best plan of one configuration, if it is below `cutoff` seconds."""
        setting = self.settings[index]
        cost, chain = self.prices.chains(setting)[alternative]
        found = stages.solve(
            columns.build(chain, setting), self.limit, recompute=self.recompute,
            starts=self.starts, cutoff=cutoff,
        )
        if found is None:
            return None
        choice = Choice.of(setting, cost, found)
        self.solved[index, alternative] = choice
        return choice

    def other_meshes(self, wanted: int) -> list[Choice]:
        """The best known plan of other mesh shapes; the most promising are solved for this."""
        if self.best is None:
            return []
        known: dict[Mesh, Choice] = {}
        for choice in self.solved.values():
            if choice.mesh not in known or choice.step_seconds < known[choice.mesh].step_seconds:
                known[choice.mesh] = choice
        known.pop(self.best.mesh, None)
        tries = Counter[Mesh]()
        for entry in sorted(self.queue):
            mesh = self.settings[entry.index].mesh
            if len(known) >= wanted or mesh in known or mesh == self.best.mesh or tries[mesh] >= 2:
                continue
            tries[mesh] += 1
            number = max(entry.alternative, 0)
            if number < len(self.prices.chains(self.settings[entry.index])):
                choice_or_none = self.solve(entry.index, number, float("inf"))
                if choice_or_none is not None:
                    known[mesh] = choice_or_none
        return sorted(known.values(), key=lambda c: c.step_seconds)[:wanted]


def search(
    provider: CostProvider,
    cluster: Cluster,
    options: SearchOptions,
    progress: Callable[[Progress], None] | None = None,
    *,
    score_recipes: bool = True,
) -> SearchResult:
    """The fastest plan that fits, with its proof; `status` is `infeasible` when none does.

    Raises `UsageError` for pins that contradict each other, the model, the cluster or the batch, and
    `PassError` when the independent evaluation of the plan differs from the objective.
    """
    begin = time.perf_counter()
    names = provider.block_names
    degrees = [d for d in provider.tp_degrees(cluster.size) if cluster.size % d == 0]
    check_pins(options.pins, cluster, options.global_batch, names, degrees)
    found, notes = settings(cluster, options, names, degrees)
    if not found:
        raise UsageError(
            f"no configuration of {cluster.size} ranks is legal: {'; '.join(notes) or 'pins'}",
            next_step="change the global batch, the number of ranks or the pins",
        )
    limit = options.limit(cluster)
    prices = Prices(provider, options.pins.boundary)
    state = _Search(prices, found, options, limit)
    deadline = begin + options.time_limit if options.time_limit is not None else None
    least = state.run(deadline, progress)
    return _result(state, options, cluster, least, begin, notes, score_recipes)


def _result(
    state: _Search,
    options: SearchOptions,
    cluster: Cluster,
    least: float,
    begin: float,
    notes: list[str],
    score_recipes: bool,
) -> SearchResult:
    """Evaluate, compare with the plain recipes, and put the proof together."""
    from autopar.search.recipes import recipes  # it prices through this module's classes

    best, status, gap, evaluation = state.best, "infeasible", None, None
    scores = recipes(state.prices, cluster, options, state.limit) if score_recipes and best else ()
    if best is not None:
        for score in scores:
            # Only a search that ran out of time can be beaten by a configuration of its own space.
            if score.fits and score.choice and not str(options.pins):
                if score.choice.step_seconds < best.step_seconds * (1 - TIE) and score.in_space:
                    best = state.best = score.choice
        gap = max(0.0, (best.step_seconds - least) / best.step_seconds)
        status = "optimal" if gap <= TIE else "feasible"
        evaluation = evaluate(best, best.chain.blocks, cluster)
        assert_agrees(best, evaluation)
    meshes = {s.mesh for s in state.settings}
    state.count["considered"] = len(state.settings)
    return SearchResult(
        status=status,
        choice=best,
        evaluation=evaluation,
        bound_step_seconds=least if best is not None else None,
        gap=gap,
        memory_limit=state.limit,
        shapes=len(meshes),
        pruned=len(meshes - state.solved_meshes),
        configurations=dict(sorted(state.count.items())),
        alternatives=tuple(state.other_meshes(options.alternatives)),
        seconds=time.perf_counter() - begin - state.prices.seconds,
        provider_seconds=state.prices.seconds,
        notes=tuple(notes),
        recipes=tuple(scores),
    )
