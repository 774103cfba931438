"""Regions without gradient become ordinary ops on detached operands.

wrap_with_set_grad_enabled(False, body, x)   ->   y = body's ops on detach(x)

In two steps: what stood in a region is marked by `meta["no_grad"]`; when it is known which values
have a gradient, and writes in place are gone, the operands of marked ops are detached.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_REGION = "wrap_with_set_grad_enabled"


def inline_no_grad(graph: fx.Graph, owner: torch.nn.Module) -> None:
    """Edit `graph`, whose regions are submodules of `owner`; regions within regions too.

    Ops that run without gradient are marked.
    """
    for node in list(graph.nodes):
        if node.op == "call_function" and _is_region(node):
            _inline(graph, node, owner)
    for node in list(graph.find_nodes(op="get_attr")):
        if not node.users:
            graph.erase_node(node)


def _is_region(node: fx.Node) -> bool:
    higher = isinstance(node.target, torch._ops.HigherOrderOperator)
    return higher and str(node.target) == _REGION


def _inline(graph: fx.Graph, region: fx.Node, owner: torch.nn.Module) -> None:
    enabled, body, *operands = region.args
    assert isinstance(body, fx.Node)
    inside: Any = owner.get_submodule(str(body.target))
    inline_no_grad(inside.graph, inside)
    values: dict[fx.Node, Any] = dict(
        zip(inside.graph.find_nodes(op="placeholder"), operands, strict=True)
    )
    with graph.inserting_before(region):
        for node in inside.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            values[node] = graph.node_copy(node, lambda n: values[n])
            values[node].meta = {"no_grad": not enabled, **node.meta}  # an inner region counts
        results = fx.map_arg(inside.graph.output_node().args[0], lambda n: values[n])
    for user in list(region.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    if region.users:
        region.replace_all_uses_with(results)
    graph.erase_node(region)


def detach_operands(graph: fx.Graph) -> None:
    """Cut the gradient where a marked op reads a value with one (`meta["requires_grad"]`)."""
    cut: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if not runs_without_gradient(node):
            continue
        for operand in node.all_input_nodes:
            if not operand.meta.get("requires_grad", False):
                continue
            if operand not in cut:
                with graph.inserting_before(node):
                    cut[operand] = detached(graph, operand, node)
            node.replace_input_with(operand, cut[operand])


def runs_without_gradient(node: fx.Node) -> bool:
    """Whether it stood in a region without gradient; picking one of several results is no op."""
    return bool(node.meta.get("no_grad")) and node.target is not operator.getitem


def detached(graph: fx.Graph, value: fx.Node, like: fx.Node) -> fx.Node:
    """`value` without gradient, in the module and at the line of `like`."""
    made = graph.call_function(torch.ops.aten.detach.default, (value,))
    made.meta = {**like.meta, "val": value.meta["val"], "requires_grad": False}
    return made
