"""Split the experts of every layer over the ranks of ep: neighbours among the replicas.

experts(x, index, weights, up[e, i, h], …)   ->   exchanged_experts(x, index, weights,
                                                      up[e/4, i, h], …, 4, 'ep')

Each rank keeps its own tokens; rows travel to the ranks of their experts and back. What comes out
is a block graph like any other, in which the parameters of experts are smaller: the tp axis is
placed on it as on any.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.errors import PlanError
from autopar.experts.operands import TENSORS, is_expert_call, own_arguments
from autopar.marks import REPLICATE
from autopar.mesh import EP
from autopar.parts import Parts, Slot
from autopar.passes.analysis.beside_exchange import mark_beside
from autopar.passes.rewrite.specialize import run_on_meta

# Of the operands, those that hold the experts.
_HELD = slice(3, TENSORS)


@dataclass(frozen=True)
class SplitExperts:
    name: str = "split-experts"

    def run(self, parts: Parts) -> Parts:
        ranks = parts.decided.mesh.ep
        if ranks == 1:
            return parts
        split = False
        for kind, graph in parts.graphs.items():
            if why := not_split(graph, parts.slots[kind], ranks):
                raise PlanError(
                    f"ep {ranks} can't split the experts of {kind}: {why}",
                    next_step="use another ep, or ep 1",
                )
            split = split_experts(graph, ranks) or split
        if not split:
            raise PlanError(
                f"mesh.ep is {ranks}, but the model has no experts", next_step="use ep 1"
            )
        return parts


def expert_calls(graph: fx.GraphModule) -> list[fx.Node]:
    """The ops of a block graph that compute the experts of a layer."""
    return [node for node in graph.graph.nodes if is_expert_call(node)]


def not_split(graph: fx.GraphModule, slots: tuple[Slot, ...], ranks: int) -> str:
    """Why `ranks` ranks can't split the experts of a block graph; '' when they can."""
    kinds = dict(zip(graph.graph.find_nodes(op="placeholder"), slots, strict=True))
    for node in expert_calls(graph):
        if node.meta.get(REPLICATE):
            return "they are marked to be replicated"
        for operand in _held(node):
            slot = kinds.get(operand)
            if slot is None or slot.kind != "parameter":
                return f"{operand.name} is no parameter"
            if len(operand.users) > 1:
                return f"other ops read the parameter {slot.name!r} too"
            count = operand.meta["val"].shape[0]
            if count % ranks:
                return f"its {count} experts do not divide by {ranks}"
    return ""


def held_slots(graph: fx.GraphModule, slots: tuple[Slot, ...]) -> list[Slot]:
    """What the placeholders are that hold the experts of a block graph."""
    kinds = dict(zip(graph.graph.find_nodes(op="placeholder"), slots, strict=True))
    held = [operand for node in expert_calls(graph) for operand in _held(node)]
    return [kinds[operand] for operand in held if operand in kinds]


def split_experts(graph: fx.GraphModule, ranks: int) -> bool:
    """Edit a static block graph in place, and mark what can run beside the exchanges; whether it
    has experts."""
    found = expert_calls(graph)
    for node in found:
        for operand in _held(node):
            shape = operand.meta["val"].shape
            operand.meta["val"] = torch.empty(
                (shape[0] // ranks, *shape[1:]), dtype=operand.meta["val"].dtype, device="meta"
            )
            operand.meta[EP] = True
        node.args = own_arguments(node.args, ranks, EP)
        target: Any = torch.ops.autopar.exchanged_experts.default
        node.target = target
        run_on_meta(node)
    for node in found:
        mark_beside(graph.graph, node)
    if found:
        graph.recompile()
    return bool(found)


def _held(node: fx.Node) -> list[fx.Node]:
    return [a for a in node.args[_HELD] if isinstance(a, fx.Node)]
