"""Remove what computes nothing, and writes in place that need not be.

    aten.to.dtype_layout(w, dtype=float32, device=meta)   ->   w       (it is float32 already)
    aten.to.device(x, meta, bfloat16)                     ->   aten.to.dtype(x, bfloat16)
    aten.arange(4, device=cpu)                            ->   aten.arange(4, device=meta)
    aten._assert_tensor_metadata(y)                       ->
    aten.add_(h, y)                                       ->   aten.add(h, y)
    aten.histc(counts, 8, 0, 7)                           ->   of whole numbers: in float32

So go assertions, idle casts, full slices, idle dropout and dead nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.parts import Parts
from autopar.passes.analysis.aliases import memory_roots, read_later, written
from autopar.program import GraphInput, Program, outputs_of

aten = torch.ops.aten
_CASTS = {"to", "_to_copy", "type_as"}
_ASSERTIONS = ("_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain")


@dataclass(frozen=True)
class Simplify:
    name: str = "simplify"

    def run(self, parts: Parts) -> Parts:
        program = parts.program
        module = program.graph_module
        graph = module.graph
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if _is_assertion(node):
                graph.erase_node(node)
                continue
            if isinstance(node.kwargs.get("device"), torch.device):
                # All values of a rank are on its one device, also those that a model makes on cpu.
                node.update_kwarg("device", torch.device("meta"))
            same = _same_as_input(node)
            if same is not None:
                node.replace_all_uses_with(same)
                graph.erase_node(node)
            elif _op_name(node) in _CASTS:
                _plain_cast(graph, node)
            elif _op_name(node) == "histc":
                _float_histogram(graph, node)
        _out_of_place(graph)
        return parts.evolve(program=drop_unused(program))


def drop_unused(program: Program) -> Program:
    """The program without dead nodes and without parameters and buffers that nothing reads."""
    module = program.graph_module
    _drop_dead(module.graph)
    kept = _drop_unused_inputs(program, module.graph)
    module.recompile()
    loss = outputs_of(module.graph)[0].name
    return program.with_graph(module, inputs=kept, loss=loss)


def _op_name(node: fx.Node) -> str:
    return str(getattr(node.target, "_opname", ""))


def _is_assertion(node: fx.Node) -> bool:
    return _op_name(node).startswith(_ASSERTIONS)


def _same_as_input(node: fx.Node) -> fx.Node | None:
    """The input that this node hands on unchanged, if it does."""
    name = _op_name(node)
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node) or not isinstance(first.meta.get("val"), torch.Tensor):
        return None
    source, value = first.meta["val"], node.meta.get("val")
    if name in _CASTS and isinstance(value, torch.Tensor) and not node.kwargs.get("copy"):
        return first if source.dtype == value.dtype else None
    if name == "slice":
        start = node.args[2] if len(node.args) > 2 else None
        end = node.args[3] if len(node.args) > 3 else None
        step = node.args[4] if len(node.args) > 4 else 1
        full = (
            start in (None, 0)
            and step == 1
            and (end is None or (isinstance(end, int) and end >= 2**62))
        )
        return first if full else None
    if name == "dropout":
        return first if node.args[1] == 0 or not node.args[2] else None
    return None


def _plain_cast(graph: fx.Graph, node: fx.Node) -> None:
    """Any form of `.to` becomes `to.dtype`: devices are the runtime's business."""
    value = node.meta["val"]
    with graph.inserting_before(node):
        cast = graph.call_function(aten.to.dtype, (node.args[0], value.dtype))
    cast.meta = dict(node.meta)
    node.replace_all_uses_with(cast)
    graph.erase_node(node)


def _float_histogram(graph: fx.Graph, node: fx.Node) -> None:
    """Whole numbers are counted as float32, which every device can; exact up to 2**24.

    Libraries ask for the device and take the form for it; the meta device is none of them.
    """
    source, value = node.args[0], node.meta["val"]
    assert isinstance(source, fx.Node)
    if value.is_floating_point():
        return
    with graph.inserting_before(node):
        wide = graph.call_function(aten.to.dtype, (source, torch.float32))
    wide.meta = {**node.meta, "val": source.meta["val"].to(torch.float32)}
    with graph.inserting_after(node):
        back = graph.call_function(aten.to.dtype, (node, value.dtype))
    back.meta = dict(node.meta)
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    node.update_arg(0, wide)
    node.meta = {**node.meta, "val": value.to(torch.float32)}


def _out_of_place(graph: fx.Graph) -> None:
    """`x.add_(y)` becomes `x.add(y)`, which can be sharded, if nothing else reads that memory."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    roots = memory_roots(graph)
    for node in order:
        changed = written(node)
        target = _functional(node)
        if target is None or len(changed) != 1 or roots[changed[0]].op == "placeholder":
            continue
        value, source = node.meta.get("val"), changed[0].meta.get("val")
        if not isinstance(value, torch.Tensor) or not isinstance(source, torch.Tensor):
            continue
        if value.dtype == source.dtype and not read_later(node, changed[0], roots, order):
            node.target = target


def _functional(node: fx.Node) -> Any:
    """The overload of `op` that has the schema of `op_`, if there is one that keeps the dtype."""
    name, overload = _op_name(node), getattr(node.target, "_overloadname", "")
    if (
        not name.endswith("_")
        or name.startswith("_")
        or getattr(node.target, "namespace", "") != "aten"
    ):
        return None
    packet = getattr(aten, name[:-1], None)
    if packet is None or overload not in packet.overloads():
        return None
    target = getattr(packet, overload)
    wanted = [(a.name, str(a.type)) for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return target if [(a.name, str(a.type)) for a in target._schema.arguments] == wanted else None


def _drop_dead(graph: fx.Graph) -> None:
    """Dead code, in reverse; ops that write in place stay."""

    def impure(node: fx.Node) -> bool:
        schema = getattr(node.target, "_schema", None)
        writes = schema is not None and schema.is_mutable
        return node.op in ("placeholder", "output") or bool(writes)

    graph.eliminate_dead_code(is_impure_node=impure)


def _drop_unused_inputs(program: Program, graph: fx.Graph) -> tuple[GraphInput, ...]:
    """Unread parameters and buffers leave the graph; batch inputs stay (the user gives them)."""
    kept: list[GraphInput] = []
    nodes: dict[str, Any] = {n.name: n for n in graph.find_nodes(op="placeholder")}
    for item in program.inputs:
        node = nodes[item.name]
        if item.kind != "input" and not node.users:
            graph.erase_node(node)
        else:
            kept.append(item)
    return tuple(kept)
