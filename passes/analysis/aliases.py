"""Which nodes share memory, and which write into it: read off the ops' schemas."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable

import torch
from torch import fx


def memory_roots(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Each node -> the node that made the memory it may share (itself, when it is new)."""
    roots: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        source = view_of(node)
        roots[node] = roots[source] if source is not None else node
    return roots


def written(node: fx.Node) -> list[fx.Node]:
    """The operands that an op changes in place; running statistics of a batch norm included."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    if node.target._opname == "batch_norm":
        # Its schema does not tell: with `training` it moves the statistics that it is given.
        return [n for n in node.args[3:5] if isinstance(n, fx.Node)] if node.args[5] else []
    found = []
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [value] if isinstance(value, fx.Node) else []
    return found


def read_later(
    node: fx.Node, changed: fx.Node, roots: dict[fx.Node, fx.Node], order: dict[fx.Node, int]
) -> bool:
    """Whether memory that `node` writes is read after it by another name than the node's result."""
    result = {node}
    for later in order:
        # What is made from the result sees the change wherever it lives.
        if order[later] > order[node] and view_of(later) in result:
            result.add(later)
    names = [n for n in order if roots[n] is roots[changed] and n not in result]
    return any(order[user] > order[node] for name in names for user in name.users)


def view_of(node: fx.Node) -> fx.Node | None:
    """The operand whose memory the result is, or looks at; None when it is new memory."""
    if node.target is operator.getitem:
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return None
        # One of several results shares memory with an operand only if the op returns views.
        schema = getattr(source.target, "_schema", None)
        own = schema is not None and all(r.alias_info is None for r in schema.returns)
        return None if own else source
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    given: set[str] = set()
    for result in node.target._schema.returns:
        if result.alias_info is not None:
            given |= set(result.alias_info.before_set)
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        info = argument.alias_info
        if info is None or not isinstance(value, fx.Node):
            continue
        # `*`: the members of a list, as split and unbind return them.
        if given & set(info.before_set) or "*" in info.after_set:
            return value
    return None


def ancestors(
    graph: fx.Graph,
    wanted: Iterable[fx.Node],
    *,
    through_sizes: bool = True,
    until: Container[fx.Node] = (),
) -> set[fx.Node]:
    """All that `wanted` is computed from: inputs of inputs, and what writes into their memory.

    Without `through_sizes` a tensor of which only the size is used is no ancestor. What those in
    `until` are computed from does not count.
    """
    roots = memory_roots(graph)
    writers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        for changed in written(node):
            writers.setdefault(roots[changed], []).append(node)
    found: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node in until:
                continue
            size = isinstance(node.meta.get("val"), torch.SymInt | int)
            stack += node.all_input_nodes if through_sizes or not size else []
            stack += writers.get(roots[node], [])
    return found
