"""Regions without gradient become ordinary ops whose results are detached.

wrap_with_set_grad_enabled(False, body, x)   ->   y = body's ops on x;  detach(y)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

_REGION = "wrap_with_set_grad_enabled"


def inline_no_grad(graph: fx.Graph, owner: torch.nn.Module) -> None:
    """Edit `graph`, whose regions are submodules of `owner`; regions within regions too."""
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
            values[node].meta = dict(node.meta)
        results = fx.map_arg(inside.graph.output_node().args[0], lambda n: values[n])
        if not enabled:
            results = fx.map_arg(results, lambda n: _detached(graph, n))
    for user in list(region.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    if region.users:
        region.replace_all_uses_with(results)
    graph.erase_node(region)


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return node
    made = graph.call_function(torch.ops.aten.detach.default, (node,))
    made.meta = dict(node.meta)
    return made
