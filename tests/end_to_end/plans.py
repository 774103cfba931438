"""Plans for toy models under pins, from one capture and, for a number of ranks, one set of
prices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from autopar.api import COMPUTE, default_precision
from autopar.axis import Axis
from autopar.cluster import Cluster
from autopar.models import ModelSource
from autopar.op_call import OpCall
from autopar.passes.analysis import candidates
from autopar.passes.analysis.recompute_frontier import recompute_frontier
from autopar.passes.capture import capture
from autopar.placement import Placement
from autopar.plan_document import Plan
from autopar.rules.language import Rule
from autopar.rules.strategy import Strategy
from autopar.search.enumerate import search
from autopar.search.options import SearchOptions, parse_pins
from autopar.workflow.forced_pins import with_forced_pins
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.outcome import build_plan
from autopar.workflow.prepare import prepare
from autopar.workflow.verification import build_real


def split_experts_only(factor: str) -> None:
    """From here on, in this process, experts are split by `factor` or not at all."""
    every = candidates.strategies

    def only(op: OpCall, rule: Rule | None, ranks: int) -> list[Strategy]:
        legal = every(op, rule, ranks)
        wanted = [s for s in legal if s.name == f"shard {factor}"]
        return legal[:1] + wanted if op.op_name == "experts" else legal

    candidates.strategies = only  # type: ignore[attr-defined]


class Planner:
    """A captured model in its own precision and the prices that its searches have asked for so
    far.

    Weights are always split, as pins say that have a tp: without one it makes no difference.
    """

    def __init__(self, module: nn.Module, source: ModelSource) -> None:
        self.precision = default_precision(module)
        program = capture(
            module,
            source.example_inputs,
            name=source.name,
            dtype=COMPUTE[self.precision],
            loss_fn=source.loss_fn,
        )
        self.program = prepare(program, program.sizes)
        self._costs: dict[Any, ModelCosts] = {}

    @classmethod
    def of(cls, model: str) -> Planner:
        """The planner of a MODEL as on the command line."""
        return cls(*build_real(model, None, 0))

    def in_part(self, plan: Plan, corner: int) -> Plan:
        """A plan of this planner with every block recomputed in part: by one corner of its kind's
        frontier."""
        tp, boundary = plan.mesh.tp, Placement.parse(plan.boundary)
        known = self._costs.items()
        costs = next(c for (n, b), c in known if n == plan.mesh.size and b in (None, plan.boundary))
        costs = costs.over(plan.mesh.cp, tp, plan.mesh.ep)
        sets: dict[str, dict[str, tuple[str, ...]]] = {}
        for kind in plan.kinds:
            chosen = plan.placements.get(kind, {})
            graph, slots = costs.placed_graph(kind, tp, plan.microbatch, chosen, boundary)
            found = recompute_frontier(graph, slots, Axis(tp, 1, costs.cluster, plan.mesh.cp))
            if found:
                sets[kind] = {"set": found[max(corner, -len(found))].ops}
        kind_of = {block: kind for kind, blocks in plan.kinds.items() for block in blocks}
        stages = tuple(
            replace(s, recompute=(), selective={b: "set" for b in s.blocks if kind_of[b] in sets})
            for s in plan.stages
        )
        return replace(plan, reruns=sets, stages=stages)

    def plan(self, ranks: int, pins: str, global_batch: int = 8) -> Plan:
        """What `autopar.plan` gives on `cpu:ranks`, without the explanation."""
        cluster, program = Cluster.parse(f"cpu:{ranks}"), self.program
        options = SearchOptions(
            global_batch=global_batch,
            precision=self.precision,
            optimizer="adamw",
            pins=parse_pins(pins),
        )
        options = with_forced_pins(options, program)
        boundary = options.pins.boundary
        key = ranks, boundary
        if key not in self._costs:
            self._costs[key] = ModelCosts(
                program, cluster, program.sizes, boundary=boundary, split_weights=True
            )
        costs = self._costs[key]
        result = search(costs, cluster, options, explain=False)
        assert result.choice is not None, pins
        return build_plan(
            program,
            cluster,
            result,
            program.sizes,
            global_batch,
            costs.blocks.kinds,
            costs.flops_per_sample(result.choice.microbatch),
            {},
            costs.all_notes(),
        )
