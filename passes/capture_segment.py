"""The nodes that one call of a layer added to the graph being traced, and how to add them again.

    layer 1 of x:  a = linear(x, w1); y = a + x      layer 5 of z:  b = linear(z, w5); u = b + z

A node outside the stretch has roles: it is an argument, a tensor of the layer itself, or the same
node for all layers. A second recording leaves the roles that explain both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    set_proxy_slot,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from autopar.passes.capture_state import Same

# ("argument", index), ("own", place), ("outer", node): one way to say which node or tensor it is.
Role = tuple[str, Any]
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class NotRepeatable(Exception):
    """Why a call can't stand for others."""


@dataclass(frozen=True)
class Site:
    """A call as the tracer sees it: argument leaves, the layer's own tensors by place, its path."""

    tracer: Any
    leaves: list[Any]
    own: dict[str, torch.Tensor]
    stack: dict[str, tuple[str, Any]]
    trace: str

    @property
    def path(self) -> str:
        return next(reversed(self.stack.values()))[0]

    def tensor(self, role: Role) -> torch.Tensor:
        kind, what = role
        held: dict[str, Any] = {"argument": self.leaves, "own": self.own}
        found: torch.Tensor = held[kind][what] if kind in held else what.held
        return found

    def node(self, role: Role) -> fx.Node | None:
        if role[0] == "outer":
            return role[1]  # type: ignore[no-any-return]
        return node_of(self.tracer, self.tensor(role))

    def roles(self) -> dict[fx.Node, set[Role]]:
        """The roles of the nodes that stand for its tensors at this moment."""
        found: dict[fx.Node, set[Role]] = {}
        for role, value in self.tensors():
            node = node_of(self.tracer, value)
            if node is not None:
                found.setdefault(node, set()).add(role)
        return found

    def tensors(self) -> Iterable[tuple[Role, torch.Tensor]]:
        for index, value in enumerate(self.leaves):
            if isinstance(value, torch.Tensor):
                yield ("argument", index), value
        for place, value in self.own.items():
            yield ("own", place), value


def node_of(tracer: Any, tensor: torch.Tensor) -> fx.Node | None:
    held = tracer.tensor_tracker.get(tensor)
    if held is not None and held.constant is not None:
        raise NotRepeatable("a tensor with known values")
    return None if held is None else held.proxy.node


@dataclass(frozen=True)
class NewTensor:
    """A tensor that a call makes: where it comes from and what Python sees of it."""

    node: fx.Node
    size: tuple[Any, ...]
    stride: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class Segment:
    """`moved`: tensors from before the call that other nodes stand for afterwards. `outputs`: a
    `Role`, a `NewTensor` or a plain value for each leaf of what the call returned."""

    site: Site
    nodes: list[fx.Node]
    roles: dict[fx.Node, set[Role]]
    outputs: list[Any]
    spec: Any
    moved: dict[Role, fx.Node]
    calls: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Before:
    """What has to be known of the tracer when a call begins."""

    last: fx.Node
    roles: dict[fx.Node, set[Role]]
    standing: list[tuple[torch.Tensor, fx.Node]]
    versions: list[int]
    calls: dict[str, int]

    @classmethod
    def of(cls, site: Site) -> Before:
        tracked = [(t, p.proxy.node) for t, p in site.tracer.tensor_tracker.items()]
        versions = [t._version for _, t in site.tensors()]
        calls = dict(site.tracer.num_calls)
        return cls(site.tracer.graph._root.prev, site.roles(), tracked, versions, calls)


def record(site: Site, before: Before, result: Any) -> Segment:
    """The segment of a call that has just returned `result`; raises `NotRepeatable`."""
    nodes = _nodes_since(site.tracer.graph, before.last)
    inside = set(nodes)
    roles: dict[fx.Node, set[Role]] = {}
    for node in nodes:
        _check(node)
        for operand in node.all_input_nodes:
            if operand not in inside and not is_symbolic(operand):
                roles[operand] = before.roles.get(operand, set()) | {("outer", operand)}
    moved: dict[Role, fx.Node] = {}
    names = {id(t): role for role, t in reversed([*site.tensors()])}
    for tensor, node in before.standing:
        now = node_of(site.tracer, tensor)
        if now is not node and now is not None:
            if now not in inside:
                raise NotRepeatable("a tensor is another one afterwards")
            moved[names.get(id(tensor), ("tensor", Same(tensor)))] = now
    if [t._version for _, t in site.tensors()] != before.versions:
        raise NotRepeatable("it writes into a tensor that it is given")
    leaves, spec = pytree.tree_flatten(result)
    outputs = [_output(site, leaf, inside, names) for leaf in leaves]
    _no_shared_memory(site, leaves, outputs)
    called = {
        path: count - before.calls.get(path, 0)
        for path, count in site.tracer.num_calls.items()
        if count != before.calls.get(path, 0)
    }
    if any(not within(path, site.path) for path in called):
        raise NotRepeatable("it calls a module that is no part of it")
    return Segment(site, nodes, roles, outputs, spec, moved, called)


def _nodes_since(graph: fx.Graph, last: fx.Node) -> list[fx.Node]:
    found = []
    node = last.next
    while node is not graph._root:
        found.append(node)
        node = node.next
    return found


def within(path: str, parent: str) -> bool:
    return path.startswith(parent + ".")


def is_symbolic(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), _SYMBOLIC)


def _check(node: fx.Node) -> None:
    if node.op != "call_function":
        raise NotRepeatable(f"a node {node.op}")
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        raise NotRepeatable(f"a region {node.target}")
    if free_unbacked_symbols(node.meta.get("val")):
        raise NotRepeatable("a size that depends on values")


def _output(site: Site, leaf: Any, inside: set[fx.Node], names: dict[int, Role]) -> Any:
    if isinstance(leaf, torch.Tensor):
        if id(leaf) in names:
            return names[id(leaf)]
        node = node_of(site.tracer, leaf)
        if node not in inside or type(leaf) is not torch._subclasses.FakeTensor:
            raise NotRepeatable("it returns a tensor that it did not make")
        if leaf.storage_offset() != 0 or leaf.layout is not torch.strided:
            raise NotRepeatable("it returns a part of a tensor")
        assert node is not None
        made = NewTensor(
            node, tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype, leaf.device,
            leaf.requires_grad,
        )  # fmt: skip
        if leaf.requires_grad and (leaf.is_leaf or _fresh(made).stride() != leaf.stride()):
            raise NotRepeatable("it returns a tensor that can't be made alike")
        return made
    if leaf is None or type(leaf) in (bool, int, float, str) or isinstance(leaf, _SYMBOLIC):
        return leaf
    raise NotRepeatable(f"it returns a {type(leaf).__name__}")


def _no_shared_memory(site: Site, leaves: list[Any], outputs: list[Any]) -> None:
    """Outputs that are new: no memory in common with each other or with what was there before."""
    taken = {t.untyped_storage()._cdata for _, t in site.tensors()}
    seen: dict[int, int] = {}
    for leaf, output in zip(leaves, outputs, strict=True):
        if isinstance(output, NewTensor):
            memory = leaf.untyped_storage()._cdata
            if memory in taken or seen.setdefault(memory, id(leaf)) != id(leaf):
                raise NotRepeatable("it returns a view of another tensor")


def _fresh(made: NewTensor) -> torch.Tensor:
    """A tensor of that kind with memory of its own, without a trace of it in the graph."""
    with disable_proxy_modes_tracing(), torch._C.DisableTorchFunction():
        found = torch.empty_strided(made.size, made.stride, dtype=made.dtype, device=made.device)
        if made.requires_grad:
            # The copy is no leaf: it may be written in place, as a computed value may.
            found = found.requires_grad_().clone()
    return found


def narrowed(first: Segment, second: Segment) -> Segment:
    """`second` with the roles that explain `first` too; raises `NotRepeatable` if they differ."""
    a, b = _ops(first), _ops(second)
    if [n.target for n in a] != [n.target for n in b]:
        raise NotRepeatable("its operations differ from call to call")
    index = {n: i for i, n in enumerate(a)}, {n: i for i, n in enumerate(b)}
    roles: dict[fx.Node, set[Role]] = {}
    for one, two in zip(a, b, strict=True):
        mine, theirs = _flat(one), _flat(two)
        if mine[1] != theirs[1] or not same_value(one.meta.get("val"), two.meta.get("val")):
            raise NotRepeatable("its operations differ from call to call")
        for x, y in zip(mine[0], theirs[0], strict=True):
            _match(x, y, index, first, second, roles)
    ends = (first.spec, len(first.outputs), first.moved.keys(), _suffixes(first))
    if ends != (second.spec, len(second.outputs), second.moved.keys(), _suffixes(second)):
        raise NotRepeatable("its results differ from call to call")
    pairs = [*zip(first.outputs, second.outputs, strict=True)]
    pairs += [(first.moved[role], second.moved[role]) for role in first.moved]
    if any(not _same_end(x, y, index) for x, y in pairs):
        raise NotRepeatable("its results differ from call to call")
    return replace(second, roles=roles)


def _ops(segment: Segment) -> list[fx.Node]:
    return [n for n in segment.nodes if not is_symbolic(n)]


def _flat(node: fx.Node) -> tuple[list[Any], Any]:
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    return leaves, spec


# Of the first and of the second segment: where a node stands in it.
Indices = tuple[dict[fx.Node, int], dict[fx.Node, int]]


def _match(
    x: Any,
    y: Any,
    index: Indices,
    first: Segment,
    second: Segment,
    roles: dict[fx.Node, set[Role]],
) -> None:
    if not (isinstance(x, fx.Node) and isinstance(y, fx.Node)):
        same = type(x) is type(y) and (x == y or repr(x) == repr(y))
    elif is_symbolic(x) or is_symbolic(y):
        same = same_value(x.meta.get("val"), y.meta.get("val"))
    elif x in index[0] or y in index[1]:
        same = index[0].get(x) == index[1].get(y)
    else:
        common = first.roles[x] & second.roles[y]
        roles[y] = roles.get(y, common) & common
        same = bool(roles[y])
    if not same:
        raise NotRepeatable("its operands differ from call to call")


def _same_end(x: Any, y: Any, index: Indices) -> bool:
    if isinstance(x, fx.Node) and isinstance(y, fx.Node):
        return index[0].get(x, -1) == index[1].get(y, -2)
    if isinstance(x, NewTensor) and isinstance(y, NewTensor):
        alike = (x.dtype, x.device, x.requires_grad) == (y.dtype, y.device, y.requires_grad)
        sizes = str((x.size, x.stride)) == str((y.size, y.stride))
        return alike and sizes and index[0].get(x.node, -1) == index[1].get(y.node, -2)
    return type(x) is type(y) and (str(x) == str(y) if isinstance(x, _SYMBOLIC) else x == y)


def _suffixes(segment: Segment) -> dict[str, int]:
    start = len(segment.site.path)
    return {path[start:]: count for path, count in segment.calls.items()}


def same_value(x: Any, y: Any) -> bool:
    """Whether two `meta["val"]` say the same of what a node makes."""
    if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor):
        return describe(x) == describe(y)
    if isinstance(x, list | tuple) and isinstance(y, list | tuple) and len(x) == len(y):
        return all(same_value(a, b) for a, b in zip(x, y, strict=True))
    return type(x) is type(y) and str(x) == str(y)


def describe(value: torch.Tensor) -> tuple[Any, ...]:
    sizes = str((tuple(value.shape), tuple(value.stride()), value.storage_offset()))
    return type(value), sizes, value.dtype, value.device, value.layout


def replay(segment: Segment, site: Site) -> Any:
    """Add the segment's nodes for another call and return what that call returns.

    Raises `NotRepeatable`, before anything is added, when a node's role can't be told.
    """
    values: dict[fx.Node, fx.Node] = {}
    for node, roles in segment.roles.items():
        found = {site.node(role) for role in roles}
        if len(found) != 1 or None in found:
            raise NotRepeatable("an operand could be two things")
        (values[node],) = found  # type: ignore[assignment]
    old, new = segment.site.trace, site.trace
    traces = (node.meta.get("stack_trace") or old for node in segment.nodes)
    if old != new and not all(trace.startswith(old) for trace in traces):
        raise NotRepeatable("the lines of its callers differ")
    graph = site.tracer.graph
    for node in segment.nodes:
        if is_symbolic(node):
            continue
        args = fx.map_arg(node.args, lambda n: values.get(n, n))
        kwargs = fx.map_arg(node.kwargs, lambda n: values.get(n, n))
        made = graph.create_node(node.op, node.target, args, kwargs, _name(graph, node))
        made.meta = _meta(node, segment.site, site)
        values[node] = made
    tracer = site.tracer
    for role, node in segment.moved.items():
        set_proxy_slot(site.tensor(role), tracer, _slot(tracer, site.tensor(role), values[node]))
    for suffix, count in _suffixes(segment).items():
        moved = site.path + suffix
        tracer.num_calls[moved] = tracer.num_calls.get(moved, 0) + count
    made_for: dict[fx.Node, torch.Tensor] = {}
    outputs = []
    for output in segment.outputs:
        if isinstance(output, NewTensor):
            if output.node not in made_for:
                made_for[output.node] = _fresh(output)
                proxy = fx.Proxy(values[output.node], tracer)
                track_tensor_tree(made_for[output.node], proxy, constant=None, tracer=tracer)
            outputs.append(made_for[output.node])
        else:
            outputs.append(site.tensor(output) if isinstance(output, tuple) else output)
    return pytree.tree_unflatten(outputs, segment.spec)


def _slot(tracer: Any, tensor: torch.Tensor, node: fx.Node) -> Any:
    held = tracer.tensor_tracker[tensor]
    return type(held)(fx.Proxy(node, tracer), None)


def _name(graph: fx.Graph, node: fx.Node) -> str | None:
    """As the tracer itself names a node."""
    packet = getattr(node.target, "overloadpacket", None)
    return None if packet is None else graph._target_to_str(packet.__name__)


def _meta(node: fx.Node, old: Site, new: Site) -> dict[str, Any]:
    """The node's metadata with the path, and the lines of the callers, of another call."""
    meta = dict(node.meta)
    # Of a count of calls by function, which nobody reads.
    meta.pop("torch_fn", None)
    inner = [*meta["nn_module_stack"].items()][len(old.stack) :]
    start, here = len(old.path), new.path
    stack = {key: (path, _class_name(kind)) for key, (path, kind) in new.stack.items()}
    for key, (path, kind) in inner:
        stack[here + key[start:]] = here + path[start:], kind
    meta["nn_module_stack"] = stack
    trace = meta.get("stack_trace")
    if trace and old.trace != new.trace:
        meta["stack_trace"] = new.trace + trace[len(old.trace) :]
    return meta


def _class_name(kind: Any) -> Any:
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else kind
