"""What limits each op of a block graph: arithmetic, memory bandwidth, or its launch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.cost.op_cost import OpCost, is_view, op_cost
from autopar.op_call import STATIC, op_call
from autopar.passes.analysis.flops import forward_flops
from autopar.passes.analysis.strategies import Axis


@dataclass(frozen=True, slots=True)
class OpPrice:
    """One op of a block as priced: for the roofline table and the picture."""

    node: str
    op: str
    path: str
    cost: OpCost
    trivial: bool


def roofline(graph: fx.GraphModule, axis: Axis) -> list[OpPrice]:
    """Seconds and roofline class (compute, memory, launch) of every op that is no collective."""
    prices = []
    for node in graph.graph.nodes:
        if node.op != "call_function" or "reshard" in node.meta:
            continue
        call = op_call(node, STATIC)
        cost = op_cost(call, forward_flops(node, call), axis.cluster.device)
        prices.append(OpPrice(node.name, call.op_name, call.path, cost, is_view(call)))
    return prices
