"""Let the statistics of a batch be those of the samples on all dp ranks.

y = batch_norm(x, w, b, None, …)   ->   y = autopar.batch_norm(x, w, b, 1e-05, 2, 'dp')
m = mean(x_1, [0, 2, 3])           ->   m = autopar.batch_mean(x_1, [0, 2, 3], 2, 'dp')
v = var(x_1, [0, 2, 3])            ->   v = autopar.batch_variance(x_1, [0, 2, 3], 2, 'dp')
p = mean(softmax, [0])             ->   p = mean(softmax, [0])
                                        p_1 = autopar.batch_average(p, 2, 'dp')
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import fx

from autopar.parts import Parts
from autopar.passes.analysis.batch_statistics import is_batch_norm, statistic_dims


@dataclass(frozen=True)
class SumStatistics:
    name: str = "sum-statistics"

    def run(self, parts: Parts) -> Parts:
        ranks, program = parts.decided.mesh.dp, parts.program
        if ranks > 1 and program.batch_statistics:
            graphs = [b.graph for s in parts.stages for b in s.blocks]
            graphs += [s.shared for s in parts.stages if s.shared is not None]
            for graph in {id(g): g for g in graphs}.values():
                sum_statistics(graph, program.batch_statistics, ranks, program.batch_sums)
        return parts


def sum_statistics(
    graph: fx.GraphModule, names: Collection[str], ranks: int, added: Collection[str] = ()
) -> None:
    """Edit a graph of local shapes in place. `names`: its nodes that take batch statistics;
    `added`: those whose parts add up."""
    ops = torch.ops.autopar
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.name not in names:
            continue
        if is_batch_norm(node):
            node.args = (*node.args[:3], node.args[7], ranks, "dp")
            node.target = ops.batch_norm.default
        elif statistic_dims(node) is None or node.name in added:
            _combine(node, ranks, node.name in added)
        elif node.target is torch.ops.aten.mean.dim:
            node.args = (*node.args, ranks, "dp")
            node.target = ops.batch_mean.default
        elif node.target is torch.ops.aten.var.dim:
            node.args = (*node.args, ranks, "dp")
            node.target = ops.batch_variance.default
    graph.recompile()


def _combine(node: fx.Node, ranks: int, add: bool) -> None:
    """Hand on the mean or sum of what all ranks have."""
    ops = torch.ops.autopar
    target = (ops.batch_total if add else ops.batch_average).default
    with node.graph.inserting_after(node):
        made = node.graph.call_function(target, (node, "dp") if add else (node, ranks, "dp"))
    made.meta = {k: v for k, v in node.meta.items() if k not in ("strategy", "flops")}
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
