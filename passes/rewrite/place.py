"""Write the plan's placements on the nodes of every block graph, as `meta["placement"]`.

linear: linear(x, w)   ->   linear: linear(x, w)    # shard n: [R*, S(0)] -> S(2)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.parts import Parts, Slot
from autopar.passes.analysis.blocks import local_op_names
from autopar.passes.analysis.candidates import Candidates, candidates
from autopar.placement import Placement, Replicate

PARAMETER = "parameter "


@dataclass(frozen=True)
class Place:
    name: str = "place"

    def run(self, parts: Parts) -> Parts:
        plan = parts.decided
        boundary = Placement.parse(plan.boundary)
        for kind, graph in parts.graphs.items():
            chosen = plan.placements.get(kind, {}) if plan.mesh.tp > 1 else {}
            place(kind, graph, parts.slots[kind], chosen, boundary, plan.mesh.tp)
        return parts


def place(
    kind: str,
    graph: fx.GraphModule,
    slots: tuple[Slot, ...],
    chosen: Mapping[str, str],
    boundary: Placement,
    ranks: int,
    found: Candidates | None = None,
) -> None:
    """Annotate one block graph. Ops and parameters that the plan does not name are replicated.

    `found`: the candidates of the graph over `ranks`, if the caller has them already. Raises
    `PlanError` naming the op for an unknown name or a strategy that is not legal.
    """
    found = found or candidates(graph, ranks)
    known = set()
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node, slot in zip(placeholders, slots, strict=True):
        placement = Replicate
        if slot.kind == "parameter":
            key = PARAMETER + relative(slot.name, kind)
            known.add(key)
            placement = Placement.parse(chosen.get(key, "R"))
            _check_parameter(kind, key, placement, node, ranks)
        elif slot.kind == "value" and node.meta.get("requires_grad"):
            placement = boundary
            _check_parameter(kind, f"boundary value {node.name}", placement, node, ranks)
        node.meta["placement"] = placement
    for node in graph.graph.find_nodes(op="get_attr"):
        node.meta["placement"] = Replicate
    calls = [n for n in graph.graph.nodes if n.op == "call_function"]
    for node, local in zip(calls, local_op_names(calls), strict=True):
        known.add(local)
        wanted = chosen.get(local, "replicate")
        strategy = next((s for s in found.strategies[node.name] if s.name == wanted), None)
        if strategy is None:
            legal = [s.name for s in found.strategies[node.name]]
            raise PlanError(
                f"block {kind!r}, op {local!r}: "
                f"strategy {wanted!r} is not legal over {ranks} ranks",
                next_step=f"choose one of {legal}",
            )
        node.meta["strategy"] = strategy
        node.meta["name_in_plan"] = local
        node.meta["placement"] = strategy.result
        node.meta["flops"] = found.flops[node.name] * strategy.share
    unknown = sorted(set(chosen) - known)
    if unknown:
        raise PlanError(
            f"block {kind!r} has no op {unknown[0]!r}",
            next_step="names are those of `autopar show`; remove it or correct it",
        )


def relative(fqn: str, kind: str) -> str:
    """A parameter's name within its block."""
    return fqn.removeprefix(kind + ".")


def _check_parameter(kind: str, key: str, placement: Placement, node: fx.Node, ranks: int) -> None:
    value: torch.Tensor = node.meta["val"]
    bad = placement.kind == "P" and key.startswith(PARAMETER)
    if placement.is_shard:
        bad = placement.dim >= value.dim() or bool(value.shape[placement.dim] % ranks)
    if bad:
        raise PlanError(
            f"block {kind!r}, {key!r} of shape {tuple(value.shape)} "
            f"can't be {placement} over {ranks} ranks",
            next_step="choose R, R* or S(d) of a dim that the degree divides",
        )
