"""Insert the op that turns each value's placement into the one its reader needs.

    h = linear(x, w)         # P                    h = linear(x, w)
    y = add(r, h)            # needs S(1)     ->    h_1 = autopar.reduce_scatter(h, 1, 8, 'tp')
                                                    y = add(r, h_1)

Readers that want the same share one op, so gradients are summed before their collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.errors import PassError
from autopar.parts import Parts
from autopar.placement import Placement, Replicate
from autopar.program import outputs_of
from autopar.reshard import reshard

# Arguments of each op after the value: d source dim, D target dim, n ranks, g group.
_SIGNATURES = {
    "copy": "g",
    "all_reduce": "g",
    "all_reduce_both": "g",
    "first_rank_only": "g",
    "first_rank_gradient": "g",
    "all_gather": "dng",
    "all_gather_slice": "dng",
    "pad": "dng",
    "reduce_scatter": "Dng",
    "slice": "Dng",
    "slice_pad": "Dng",
    "all_to_all": "dDng",
}


@dataclass(frozen=True)
class InsertCollectives:
    name: str = "insert-collectives"

    def run(self, parts: Parts) -> Parts:
        ranks = parts.decided.mesh.tp
        if ranks > 1:
            boundary = Placement.parse(parts.decided.boundary)
            for graph in parts.graphs.values():
                insert_collectives(graph, boundary, ranks)
        return parts


def insert_collectives(
    graph: fx.GraphModule, boundary: Placement, ranks: int, axis: str = "tp"
) -> None:
    """Edit a block graph that is placed on `axis` in place; values with gradient are handed out in
    `boundary`."""
    made: dict[tuple[fx.Node, Placement], fx.Node] = {}
    output = graph.graph.output_node()
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        strategy = node.meta["strategy"]
        for source, wanted in zip(operands_of(node), strategy.operands, strict=True):
            moved = _move(graph.graph, made, source, wanted, node, ranks, axis)
            if moved is not source:
                node.replace_input_with(source, moved)
    results = []
    for value in outputs_of(graph.graph):
        scalar = (
            not value.meta["val"].dim() if isinstance(value.meta["val"], torch.Tensor) else False
        )
        grad = value.meta.get("requires_grad", False)
        target = Replicate if scalar or not grad else boundary
        results.append(_move(graph.graph, made, value, target, output, ranks, axis))
    output.args = (tuple(results),)
    graph.recompile()


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Tensor operands in the order of `OpCall.operands`: each once, by first occurrence."""
    found: dict[fx.Node, None] = {}

    def visit(arg: Any) -> None:
        if isinstance(arg, fx.Node):
            found.setdefault(arg)
        elif isinstance(arg, list | tuple):
            for item in arg:
                visit(item)

    for arg in (*node.args, *node.kwargs.values()):
        visit(arg)
    return list(found)


def _move(
    graph: fx.Graph,
    made: dict[tuple[fx.Node, Placement], fx.Node],
    source: fx.Node,
    wanted: Placement,
    before: fx.Node,
    ranks: int,
    axis: str,
) -> fx.Node:
    have: Placement = source.meta["placement"]
    grad = bool(source.meta.get("requires_grad", False))
    edge = reshard(have, wanted, requires_grad=grad)
    if edge is None:
        raise PassError(
            f"no way from {have} to {wanted} for {source.name}, which {before.name} reads",
            next_step="choose another strategy for one of the two ops",
        )
    if not edge.op:
        return source
    if (source, wanted) not in made:
        values: dict[str, Any] = {"d": have.dim, "D": wanted.dim, "n": ranks, "g": axis}
        args = (source, *(values[c] for c in _SIGNATURES[edge.op]))
        target = getattr(torch.ops.autopar, edge.op).default
        with graph.inserting_before(before):
            node = graph.call_function(target, args)
        node.meta = {
            "val": source.meta["val"],
            "placement": wanted,
            "requires_grad": grad,
            "reshard": edge,
            "source_placement": have,
            "nn_module_stack": source.meta.get("nn_module_stack", {}),
        }
        made[source, wanted] = node
    return made[source, wanted]
