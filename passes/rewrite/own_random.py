"""Let every rank draw its own numbers in random ops on shards.

y = dropout(x, 0.1, True)   # x: S(1)    ->    x_1 = autopar.own_random(x, 'tp')
                                               y = dropout(x_1, 0.1, True)
                                               y_1 = autopar.same_random(y, 'tp')

Random ops on whole values stay as they are: all ranks draw the same numbers there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autopar.parts import Parts
from autopar.passes.analysis.random_ops import draws
from autopar.placement import Placement


@dataclass(frozen=True)
class OwnRandom:
    name: str = "own-random"

    def run(self, parts: Parts) -> Parts:
        if parts.decided.mesh.tp > 1:
            for graph in parts.graphs.values():
                own_random(graph)
        return parts


def own_random(graph: fx.GraphModule, axis: str = "tp") -> None:
    """Edit a block graph that is localised on `axis` in place."""
    for node in list(graph.graph.nodes):
        placement: Placement | None = node.meta.get("placement")
        if node.op != "call_function" or not draws(node):
            continue
        if placement is None or not placement.is_shard:
            continue
        source = node.all_input_nodes[0]
        with graph.graph.inserting_before(node):
            before = _mark(graph.graph, "own_random", source, axis)
        node.replace_input_with(source, before)
        with graph.graph.inserting_after(node):
            after = _mark(graph.graph, "same_random", node, axis)
        node.replace_all_uses_with(after, delete_user_cb=lambda user, own=after: user is not own)
    graph.recompile()


def _mark(graph: fx.Graph, op: str, source: fx.Node, axis: str) -> fx.Node:
    made = graph.call_function(getattr(torch.ops.autopar, op).default, (source, axis))
    kept = ("val", "placement", "requires_grad", "nn_module_stack", "global_shape")
    made.meta = {key: source.meta[key] for key in kept if key in source.meta}
    return made
