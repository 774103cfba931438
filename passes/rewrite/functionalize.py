"""Writes in place become new values, also through views; written buffers become results.

    out = zeros(4, 8)                          out = zeros(4, 8)
    row = select(out, 1, 0)                    out_1 = select_scatter(out, x, 1, 0)
    copy_(row, x)                        ->
    y = mul(out, 2)                            y = mul(out_1, 2)

    batch_norm(x, …, mean, var, True, …) ->    batch_norm(x, …, None, None, True, …)
                                               and the new mean and var from x

Memory of which a write or a view has no such form here is left as it is: capture refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from autopar.passes.analysis.aliases import memory_roots, view_of, written
from autopar.passes.rewrite.out_arguments import replace_out_arguments

aten = torch.ops.aten
Chain = tuple[fx.Node, ...]


def functionalize(graph: fx.Graph, state: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Rewrite the graph; returns, for each placeholder of `state` that is written, its last value.

    Writes into other placeholders stay, and so do writes that have no functional form.
    """
    replace_out_arguments(graph)
    running = _batch_norms(graph, set(state))
    memory = _Memory(graph, set(state))
    for node in list(graph.nodes):
        if node.op in ("call_function", "output") and node not in running:
            memory.refresh(node)
            memory.write(node)
    return {n: _own_node(graph, memory.latest[n]) for n in memory.latest if n in memory.state}


def _own_node(graph: fx.Graph, value: fx.Node) -> fx.Node:
    """A node that nothing else reads: it is computed where its result is kept."""
    if not value.users:
        return value
    with graph.inserting_before(graph.output_node()):
        return _call(graph, aten.clone.default, (value,), value)


class _Memory:
    """What each written piece of memory holds at the point the walk has reached."""

    def __init__(self, graph: fx.Graph, state: set[fx.Node]) -> None:
        self.graph = graph
        self.state = state
        self.roots = memory_roots(graph)
        self.latest: dict[fx.Node, fx.Node] = {}
        self._current: dict[fx.Node, set[fx.Node]] = {}
        self._again: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self._possible = self._rewritable(state)

    def _rewritable(self, state: set[fx.Node]) -> set[fx.Node]:
        """Memory all of whose writes have a functional form."""
        good: dict[fx.Node, bool] = {}
        for node in self.graph.nodes:
            for changed in written(node):
                root = self.roots[changed]
                here = root.op != "placeholder" or root in state
                here = here and len(written(node)) == 1 and _functional(node) is not None
                here = here and all(_inverse_known(v) for v in self._chain(changed))
                good[root] = good.get(root, True) and here
        return {root for root, possible in good.items() if possible}

    def _chain(self, node: fx.Node) -> Chain:
        """The views on the way from the root to a node, outermost first."""
        found: list[fx.Node] = []
        while node is not self.roots[node]:
            source = view_of(node)
            if source is None:
                break
            if not written(node):
                found.insert(0, node)
            node = source
        return tuple(found)

    def refresh(self, node: fx.Node) -> None:
        """Operands that name memory written since are read anew."""
        for operand in node.all_input_nodes:
            root = self.roots.get(operand)
            if root not in self.latest or operand in self._current[root]:
                continue
            value = self.latest[root]
            with self.graph.inserting_before(node):
                for view in self._chain(operand):
                    value = self._view_again(view, value)
            node.replace_input_with(operand, value)
        source = view_of(node)
        if source is not None and not written(node) and self.roots.get(source) in self.latest:
            self._current[self.roots[source]].add(node)

    def _view_again(self, view: fx.Node, source: fx.Node) -> fx.Node:
        key = (view, source)
        if key not in self._again:
            old = view_of(view)
            made = self.graph.node_copy(view, lambda n: source if n is old else n)
            made.meta = {**view.meta}
            self.roots[made] = self.roots[view]
            self._current[self.roots[view]].add(made)
            self._again[key] = made
        return self._again[key]

    def write(self, node: fx.Node) -> None:
        changed = written(node)
        if len(changed) != 1 or self.roots[changed[0]] not in self._possible:
            return
        root, target = self.roots[changed[0]], changed[0]
        chain = self._chain(target)
        value = self._new_value(node, target)
        self._current[root] = {value}
        with self.graph.inserting_before(value.next):
            for view in reversed(chain):
                source = self._parent_value(view, root)
                value = _scatter(self.graph, source, value, view)
                self._current[root].add(value)
        self.latest[root] = value
        self.roots[value] = root

    def _parent_value(self, view: fx.Node, root: fx.Node) -> fx.Node:
        """What a view was taken of, as it is before the write."""
        source = view_of(view)
        assert source is not None
        value = self.latest.get(root, root)
        for step in self._chain(source):
            value = self._again.get((step, value), step)
        return value

    def _new_value(self, node: fx.Node, target: fx.Node) -> fx.Node:
        """The op without the write; its readers read the result."""
        made = _functional(node)
        assert made is not None
        with self.graph.inserting_before(node):
            value: fx.Node = made(self.graph, node)
            kept, have = target.meta["val"], value.meta["val"]
            if have.dtype != kept.dtype:
                value = _call(self.graph, aten.to.dtype, (value, kept.dtype), node)
        node.replace_all_uses_with(value)
        self.graph.erase_node(node)
        self.roots[value] = self.roots[target]
        return value


def _call(
    graph: fx.Graph,
    target: Any,
    args: tuple[Any, ...],
    like: fx.Node,
    kwargs: dict[str, Any] | None = None,
) -> fx.Node:
    """A new op with the module path and the line of another."""
    made = graph.call_function(target, args, kwargs)
    made.meta = {k: v for k, v in like.meta.items() if k != "val"}
    values, named = fx.map_arg((args, kwargs or {}), lambda n: n.meta["val"])
    made.meta["val"] = target(*values, **named)
    return made


def _functional(node: fx.Node) -> Any:
    """A function that makes the value which a writing op leaves behind, or None."""
    name, overload = getattr(node.target, "_opname", ""), getattr(node.target, "_overloadname", "")
    if name == "copy_":
        return _copied
    if name == "zero_":
        return lambda graph, n: _call(graph, aten.zeros_like.default, (n.args[0],), n)
    if not name.endswith("_") or name.startswith("_"):
        return None
    if name in _RANDOM:
        return _drawn(name, overload)
    packet = getattr(aten, name[:-1], None)
    if packet is None or overload not in packet.overloads():
        return None
    target = getattr(packet, overload)
    same = [str(a.type) for a in target._schema.arguments] == [
        str(a.type)
        for a in node.target._schema.arguments  # type: ignore[union-attr]
    ]
    return (lambda graph, n: _call(graph, target, n.args, n, n.kwargs)) if same else None


_RANDOM = frozenset(
    ["uniform_", "normal_", "bernoulli_", "random_", "exponential_", "geometric_", "log_normal_",
     "cauchy_"]
)  # fmt: skip
# Functional forms that torch gives other names.
_NAMED_OTHERWISE = {
    ("normal_", "default"): aten.normal_functional.default,
    ("bernoulli_", "float"): aten.bernoulli.p,
}


def _drawn(name: str, overload: str) -> Any:
    """The numbers drawn: of what was there they take the shape, and no gradient."""
    other = _NAMED_OTHERWISE.get((name, overload or "default"))
    target = other or getattr(getattr(aten, name[:-1]), overload or "default")

    def make(graph: fx.Graph, node: fx.Node) -> fx.Node:
        args = node.args if name != "bernoulli_" or len(node.args) > 1 else (*node.args, 0.5)
        made = _call(graph, target, args, node, node.kwargs)
        made.meta["no_grad"] = True
        return made

    return make


def _copied(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """`copy_(target, source)`: the source, in the target's shape and dtype."""
    target: Any = node.args[0]
    source: Any = node.args[1]
    kept = target.meta["val"]
    value: fx.Node = source
    if value.meta["val"].dtype != kept.dtype:
        value = _call(graph, aten.to.dtype, (value, kept.dtype), node)
    if tuple(value.meta["val"].shape) != tuple(kept.shape):
        value = _call(graph, aten.expand_as.default, (value, target), node)
    # A value of its own: the source may be written later.
    return _call(graph, aten.clone.default, (value,), node)


def _inverse_known(view: fx.Node) -> bool:
    return getattr(view.target, "_opname", "") in _SCATTERS


def _scatter(graph: fx.Graph, source: fx.Node, value: fx.Node, view: fx.Node) -> fx.Node:
    """`source` with `value` where the view looks at it."""
    name = view.target._opname  # type: ignore[union-attr]
    return _SCATTERS[name](graph, source, value, view)  # type: ignore[no-any-return]


def _select(graph: fx.Graph, source: fx.Node, value: fx.Node, view: fx.Node) -> fx.Node:
    args = (source, value, *view.args[1:])
    return _call(graph, aten.select_scatter.default, args, view)


def _slice(graph: fx.Graph, source: fx.Node, value: fx.Node, view: fx.Node) -> fx.Node:
    args = (source, value, *view.args[1:])
    return _call(graph, aten.slice_scatter.default, args, view)


def _reshaped(graph: fx.Graph, source: fx.Node, value: fx.Node, view: fx.Node) -> fx.Node:
    return _call(graph, aten.view_as.default, (value, source), view)


def _transposed(graph: fx.Graph, source: fx.Node, value: fx.Node, view: fx.Node) -> fx.Node:
    return _call(graph, aten.transpose.int, (value, *view.args[1:]), view)


def _same(graph: fx.Graph, source: fx.Node, value: fx.Node, view: fx.Node) -> fx.Node:
    return value


_SCATTERS: dict[str, Any] = {
    "select": _select,
    "slice": _slice,
    "view": _reshaped,
    "unsqueeze": _reshaped,
    "squeeze": _reshaped,
    "transpose": _transposed,
    "alias": _same,
}


def _batch_norms(graph: fx.Graph, state: set[fx.Node]) -> set[fx.Node]:
    """Batch norms that move statistics: these become writes of their own, before the op."""
    found = set()
    for node in list(graph.nodes):
        moves = getattr(node.target, "_opname", "") == "batch_norm" and node.args[5]
        if not moves or node.args[3] not in state or node.args[4] not in state:
            continue
        mean, variance, momentum = node.args[3], node.args[4], node.args[6]
        with graph.inserting_before(node):
            x = _call(graph, aten.detach.default, (node.args[0],), node)
            dims = [d for d in range(x.meta["val"].dim()) if d != 1]
            # The running variance is the unbiased one, as torch.nn.BatchNorm documents.
            new_mean = _call(graph, aten.mean.dim, (x, dims), node)
            new_variance = _call(graph, aten.var.dim, (x, dims), node)
            for kept, new in ((mean, new_mean), (variance, new_variance)):
                if new.meta["val"].dtype != kept.meta["val"].dtype:
                    new = _call(graph, aten.to.dtype, (new, kept.meta["val"].dtype), node)
                _call(graph, aten.lerp_.Scalar, (kept, new, momentum), node)
        node.args = (*node.args[:3], None, None, *node.args[5:])
        found.add(node)
    return found
