"""The plain answers: pure data parallelism, pure FSDP, on several nodes FSDP in the node and copies
across (HSDP), the Megatron recipe, and for models with experts these split over the node; what a
plan must beat.

Each takes micro-batches of 1, 2, 4 or 8 samples, the same number of blocks on every stage, and
recomputes nothing or everything, whichever is fastest and fits. They are priced by the independent
evaluator.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopar.block_cost import ChainCost
from autopar.cluster import Cluster
from autopar.cost.evaluate import evaluate
from autopar.cost.setting import Setting
from autopar.mesh import Mesh
from autopar.plan_document import StagePlan
from autopar.search.bounds import bound
from autopar.search.options import SearchOptions
from autopar.search.prices import Prices
from autopar.search.result import Choice, RecipeScore
from autopar.search.space import divisors, ep_degrees, microbatch_sizes
from autopar.units import format_bytes

SIZES = (1, 2, 4, 8)


def recipes(
    prices: Prices, cluster: Cluster, options: SearchOptions, limit: int
) -> tuple[RecipeScore, ...]:
    """Score every recipe on `cluster` under `limit` bytes. Of pins those alone apply that the
    program leaves no choice about."""
    world = cluster.size
    score = _Scorer(prices, cluster, options, limit)
    several = min(cluster.nodes, cluster.ranks_per_node) > 1
    hybrid = [Mesh(1, world, 1, dp_replicate=cluster.nodes)] if several else []
    found = [
        score.of("data parallel (ZeRO-0)", [Mesh(1, world, 1)], 0),
        score.of("FSDP (ZeRO-3)", [Mesh(1, world, 1)], 3),
        *([score.of("HSDP (ZeRO-3 in the node, copies across)", hybrid, 3)] if hybrid else []),
        score.of("Megatron (tp in the node, least pp, ZeRO-1)", score.megatron_meshes(), 1),
    ]
    if meshes := score.expert_meshes():
        found.append(score.of("expert parallel (ep in the node, least pp, ZeRO-1)", meshes, 1))
    return tuple(found)


class _Scorer:
    def __init__(
        self, prices: Prices, cluster: Cluster, options: SearchOptions, limit: int
    ) -> None:
        self.prices, self.cluster, self.options, self.limit = prices, cluster, options, limit
        self.blocks = len(prices.provider.block_names)

    def megatron_meshes(self) -> list[Mesh]:
        """The widest legal tp inside a node, and pp from small to large."""
        world = self.cluster.size
        legal = self.prices.provider.tp_degrees(self.cluster.ranks_per_node)
        tp = max(d for d in legal if world % d == 0 and d <= self.cluster.ranks_per_node)
        return [
            Mesh(pp, world // tp // pp, tp) for pp in divisors(world // tp) if pp <= self.blocks
        ]

    def expert_meshes(self) -> list[Mesh]:
        """The widest legal ep inside a node over dp, and pp from small to large; none for a model
        without experts."""
        found = []
        for pp in divisors(self.cluster.size):
            dp = self.cluster.size // pp
            ep = max(
                d for d in ep_degrees(self.prices.provider, dp) if d <= self.cluster.ranks_per_node
            )
            if ep > 1 and pp <= self.blocks:
                found.append(Mesh(pp, dp, 1, ep=ep))
        return found

    def of(self, name: str, meshes: list[Mesh], zero: int) -> RecipeScore:
        """The first of `meshes` that fits, in its fastest form."""
        least: int | None = None
        reason = ""
        for mesh in meshes:
            if self.options.global_batch % mesh.dp:
                reason = f"global batch {self.options.global_batch} does not divide over {mesh}"
                continue
            if out := self._ruled_out(mesh, zero):
                reason = out
                continue
            best: Choice | None = None
            for setting in self._settings(mesh, zero):
                floor = bound(self.prices.optimistic(setting), setting).peak
                if floor > self.limit:
                    least = floor if least is None else min(least, floor)
                    continue
                cutoff = best.step_seconds if best else float("inf")
                for choice in self._forms(setting, cutoff):
                    peak = max(choice.peaks)
                    least = peak if least is None else min(least, peak)
                    faster = best is None or choice.step_seconds < best.step_seconds
                    if peak <= self.limit and faster:
                        best = choice
            if best is not None:
                return RecipeScore(name, True, best)
        if least is not None:
            reason = f"needs at least {format_bytes(least)} of {format_bytes(self.limit)}"
        return RecipeScore(name, None if least is None else False, None, reason)

    def _ruled_out(self, mesh: Mesh, zero: int) -> str:
        """Why the program does not let a recipe be, or ''."""
        forced = self.options.forced
        if forced.dp not in (None, mesh.dp):
            return "the samples of a step have to stay on one rank (see the notes)"
        if forced.zero == 0 and zero and mesh.dp > 1:
            return "a parameter of no dims can't be sharded"
        return ""

    def _settings(self, mesh: Mesh, zero: int) -> Iterator[Setting]:
        samples = self.options.global_batch // mesh.dp
        allowed = set(self.prices.provider.microbatch_sizes(samples))
        if self.options.forced.microbatches == 1:
            allowed &= {samples}
        for size in microbatch_sizes(samples, allowed):
            if size in SIZES or len(allowed) == 1:
                count = samples // size
                yield Setting(
                    self.cluster,
                    mesh,
                    size,
                    count,
                    "1f1b" if count >= mesh.pp else "gpipe",
                    zero if mesh.dp > 1 else 0,
                    self.options.precision,
                    self.options.optimizer,
                )

    def _forms(self, setting: Setting, cutoff: float) -> Iterator[Choice]:
        """Every placement, with and without recomputation, that may take less than `cutoff`."""
        for number in self.prices.alternatives(setting):
            sketch = self.prices.sketch(setting, number)
            if bound(sketch, setting, sums=True).seconds >= cutoff:
                continue
            cost = self.prices.unpinned(setting, number)
            for full in (False, True):
                yield _even(setting, cost, full=full)


def _even(setting: Setting, cost: ChainCost, *, full: bool) -> Choice:
    """The same number of blocks on every stage (one more on the first ones), priced."""
    names = [b.name for b in cost.blocks]
    pp = setting.mesh.pp
    edges = [-(-len(names) * i // pp) for i in range(pp + 1)]
    stages = tuple(
        StagePlan(tuple(names[a:b]), tuple(names[a:b]) if full else ())
        for a, b in zip(edges, edges[1:], strict=False)
    )
    draft = Choice(setting, cost, stages, 0.0, ())
    seen = evaluate(draft, cost.blocks, setting.cluster)
    peaks = tuple(m.total for m in seen.memory_per_stage)
    return Choice(setting, cost, stages, seen.step_seconds, peaks)
