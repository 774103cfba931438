"""The ops of a plan that take the longest, and what limits each: its roofline class."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from autopar.axis import Axis
from autopar.passes.analysis.roofline import roofline
from autopar.placement import Placement
from autopar.search.result import Choice
from autopar.workflow.model_costs import ModelCosts

MOST = 5


@dataclass(frozen=True)
class HeavyOp:
    """An op of a kind of block (`block` names the first of them). `count`: such blocks on the rank
    that has the most; `seconds`: of that rank's step, forward and backward, without what runs
    again; `bound`: compute, memory, launch or communication."""

    op: str
    module: str
    block: str
    count: int
    bound: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def heaviest_ops(costs: ModelCosts, choice: Choice) -> tuple[tuple[HeavyOp, ...], dict[str, float]]:
    """At most `MOST` of them, the heaviest first; and seconds of a step by class, of all ops of the
    rank that is busiest with them. Calls of one op in one module, of one class, are told
    together."""
    mesh, chain = choice.mesh, choice.chain
    over = costs.over(mesh.cp, mesh.tp, mesh.ep)
    axis = Axis(mesh.tp, 1, costs.cluster, mesh.cp)
    found = []
    ranks = _blocks_of_ranks(choice)
    most: Counter[str] = Counter()
    for held in ranks:
        most |= held
    by_class: list[dict[str, float]] = [defaultdict(float) for _ in ranks]
    for kind, count in most.items():
        placed = chain.placements.get(kind, {})
        boundary = Placement.parse(chain.boundary)
        graph, _ = over.placed_graph(kind, mesh.tp, choice.microbatch, placed, boundary)
        seconds: dict[tuple[str, str, str], float] = defaultdict(float)
        for price in roofline(graph, axis):
            own = price.cost.forward_seconds + price.cost.backward_seconds
            if own and not price.trivial:
                seconds[price.op, price.path, price.cost.bound] += own
        times = count * choice.microbatches
        for (_, _, bound), own in seconds.items():
            for rank, held in enumerate(ranks):
                by_class[rank][bound] += held[kind] * choice.microbatches * own
        found += [
            HeavyOp(op, path, kind, count, bound, times * own)
            for (op, path, bound), own in seconds.items()
        ]
    ranked = sorted(found, key=lambda op: (-op.seconds, op.block, op.module, op.op))
    busiest = max(range(len(ranks)), key=lambda rank: sum(by_class[rank].values()))
    return tuple(ranked[:MOST]), dict(by_class[busiest])


def _blocks_of_ranks(choice: Choice) -> list[Counter[str]]:
    """Of every pp rank: how many blocks of each kind it has."""
    kinds = {b.name: b.kind for b in choice.chain.blocks}
    return [
        Counter(
            kinds[name]
            for part in choice.setting.parts_of(rank)
            for name in choice.stages[part].blocks
        )
        for rank in range(choice.mesh.pp)
    ]
