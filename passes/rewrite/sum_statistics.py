"""Let the statistics of a batch norm be those of the batch on all dp ranks.

y = batch_norm(x, w, b, None, …)   ->   y = autopar.batch_norm(x, w, b, 1e-05, 2, 'dp')
m = mean(x_1, [0, 2, 3])           ->   m = autopar.batch_mean(x_1, [0, 2, 3], 2, 'dp')
v = var(x_1, [0, 2, 3])            ->   v = autopar.batch_variance(x_1, [0, 2, 3], 2, 'dp')
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from autopar.parts import Parts
from autopar.passes.analysis.batch_statistics import is_batch_norm


@dataclass(frozen=True)
class SumStatistics:
    name: str = "sum-statistics"

    def run(self, parts: Parts) -> Parts:
        ranks, names = parts.decided.mesh.dp, parts.program.batch_statistics
        if ranks > 1 and names:
            graphs = [b.graph for s in parts.stages for b in s.blocks]
            graphs += [s.shared for s in parts.stages if s.shared is not None]
            for graph in {id(g): g for g in graphs}.values():
                sum_statistics(graph, names, ranks)
        return parts


def sum_statistics(graph: fx.GraphModule, names: Collection[str], ranks: int) -> None:
    """Edit a graph of local shapes in place. `names`: its nodes that take batch statistics."""
    ops = torch.ops.autopar
    for node in graph.graph.nodes:
        if node.op != "call_function" or node.name not in names:
            continue
        if is_batch_norm(node):
            node.args = (*node.args[:3], node.args[7], ranks, "dp")
            node.target = ops.batch_norm.default
        elif node.target is torch.ops.aten.mean.dim:
            node.args = (*node.args, ranks, "dp")
            node.target = ops.batch_mean.default
        elif node.target is torch.ops.aten.var.dim:
            node.args = (*node.args, ranks, "dp")
            node.target = ops.batch_variance.default
    graph.recompile()
