"""FLOPs of a static block graph: of every op, forward and backward.

A product of m x k by k x n counts 2 m k n, and as much again for each factor that needs a gradient.
Fused attention counts its two products whole, causal or not, and 2.5 times that in its backward.
Other ops count nothing: they are priced by the bytes they move. This is how
`torch.utils.flop_counter` counts.
"""

from __future__ import annotations

from torch import fx

from autopar.cost.op_cost import op_flops
from autopar.op_call import STATIC, OpCall, op_call
from autopar.rules import rule_for


def graph_flops(graph: fx.GraphModule) -> dict[fx.Node, tuple[float, float]]:
    """(forward, backward) FLOPs of every op: of one rank in a local graph, else of the whole."""
    return {
        node: op_flops(call, forward_flops(node, call))
        for node in graph.graph.nodes
        if node.op == "call_function"
        for call in [op_call(node, STATIC)]
    }


def forward_flops(node: fx.Node, call: OpCall) -> float:
    """FLOPs of an op's forward: its share as placed (`meta["flops"]`), else by its rule."""
    if "flops" in node.meta:
        return float(node.meta["flops"])
    rule = rule_for(call)
    return rule.flops if rule is not None else 0.0
