"""Ops that take the mean and variance of a whole batch: they can be summed over dp ranks.

batch_norm(x, w, b, None, None, True, …)     normalises with the statistics of all dims but 1
mean(detach(x), [0, 2]), var(detach(x), …)   what a batch norm keeps, or a user's own running mean

A buffer that follows from parameters and buffers alone (the vectors of a spectral norm, a counter
of steps) is no matter of the batch.

The first needs the gradient through the statistics; the others are of a value without gradient.
Other values that a batch's parts add up to are found by running them: see `coupled_samples`.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.passes.analysis.aliases import ancestors
from autopar.passes.analysis.random_ops import draws
from autopar.program import Program, outputs_of

_ALONE = (torch.ops.aten.mean.dim, torch.ops.aten.var.dim)


def is_batch_norm(node: fx.Node) -> bool:
    """A batch norm in training whose running statistics are kept by ops of their own."""
    if getattr(node.target, "_opname", "") != "batch_norm":
        return False
    return bool(node.args[5]) and node.args[3] is None and node.args[4] is None


def statistic_dims(node: fx.Node) -> frozenset[int] | None:
    """The dims over which an op takes statistics; None for other ops.

    Only forms that `autopar.passes.rewrite.sum_statistics` can rewrite count.
    """
    if node.op != "call_function" or not node.all_input_nodes:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or not isinstance(source.meta.get("val"), torch.Tensor):
        return None
    rank = source.meta["val"].dim()
    if is_batch_norm(node):
        return frozenset(range(rank)) - {1}
    if node.target not in _ALONE or node.kwargs or len(node.args) != 2:
        return None
    if source.meta.get("requires_grad", False) or not isinstance(node.args[1], list | tuple):
        return None
    return frozenset(int(d) % rank for d in node.args[1])


def updates_of_batch(program: Program) -> tuple[str, ...]:
    """Names of the buffers whose new values depend on the samples of a step, or on chance."""
    inputs = {i.name for i in program.of_kind("input") if i.batch_dim >= 0}
    graph = program.graph
    return tuple(
        name
        for name, value in zip(program.updates, outputs_of(graph)[1:], strict=True)
        if any(n.name in inputs or draws(n) for n in ancestors(graph, [value]))
    )
