"""From what torch.export returned to a Program: inputs by name, symbols, what needs a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autopar.errors import CaptureError
from autopar.experts.expected import expected_load
from autopar.passes.capture_refusal import refuse_mutation, refuse_regions, refuse_values
from autopar.passes.capture_writes import refuse_silent_writes
from autopar.passes.rewrite.functionalize import functionalize
from autopar.passes.rewrite.inline_no_grad import (
    detach_operands,
    detached,
    inline_no_grad,
    runs_without_gradient,
)
from autopar.program import GraphInput, Program, is_differentiable, outputs_of

_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


def program_of(
    exported: ExportedProgram,
    model: nn.Module,
    name: str,
    tensors: Mapping[str, torch.Tensor],
    fixed: Mapping[str, Any],
    notes: tuple[str, ...] = (),
) -> Program:
    """`tensors` and `fixed`: the example's inputs by name, in the order they were exported."""
    batch = batch_size(tensors)
    aliases = parameter_aliases(model)
    graph = exported.graph
    constants: dict[str, torch.Tensor] = {}
    inputs = _inputs(exported, tensors, batch, aliases, constants)
    inline_no_grad(graph, exported.graph_module)
    refuse_regions(graph)
    refuse_values(graph)
    trained = _trained(inputs, model)
    refuse_silent_writes(graph, trained)
    buffers = {i.name: i.target for i in inputs if i.kind == "buffer"}
    state = [n for n in graph.find_nodes(op="placeholder") if n.name in buffers]
    updates = functionalize(graph, state)
    module = fx.GraphModule(torch.nn.Module(), graph)
    symbols, sizes = _symbols(module.graph, inputs, tensors)
    _mark_gradients(module.graph, trained)
    detach_operands(module.graph)
    refuse_mutation(module.graph, inputs)
    loss = outputs_of(module.graph)[0]
    module.graph.output_node().args = ((loss, *_kept(module.graph, updates.values())),)
    module.recompile()
    return Program(
        name=name,
        graph_module=module,
        inputs=tuple(inputs),
        loss=loss.name,
        symbols=symbols,
        sizes=sizes,
        aliases=aliases,
        constants=constants,
        fixed=dict(fixed),
        notes=notes,
        updates=tuple(buffers[n.name] for n in updates),
        expert_load=expected_load(model),
    )


def batch_size(tensors: Mapping[str, torch.Tensor]) -> int:
    """Size of dim 0 that the tensors share; the most frequent, then the first, when they differ."""
    sizes = [v.shape[0] for v in tensors.values() if v.dim()]
    if not sizes:
        raise CaptureError(
            "no tensor among the example inputs", next_step="give at least one batched tensor"
        )
    return int(max(dict.fromkeys(sizes), key=sizes.count))


def _inputs(
    exported: ExportedProgram,
    tensors: Mapping[str, torch.Tensor],
    batch: int,
    aliases: dict[str, str],
    constants: dict[str, torch.Tensor],
) -> list[GraphInput]:
    """The placeholders in order; those of the batch get the names that the user knows."""
    placeholders = {n.name: n for n in exported.graph.find_nodes(op="placeholder")}
    user = iter(tensors.items())
    found = []
    for spec in exported.graph_signature.input_specs:
        kind = _KINDS.get(spec.kind)
        placeholder = spec.arg.name
        if kind is None:
            raise CaptureError(
                f"the graph has an input of kind {spec.kind.name} ({placeholder})",
                next_step="keep custom objects out of the forward",
            )
        if kind == "input":
            name, value = next(user)
            node = placeholders[placeholder]
            _rename(node, name)
            split = value.dim() > 0 and value.shape[0] == batch
            found.append(GraphInput(name, kind, name, 0 if split else -1))
            continue
        if kind == "constant":
            constants[placeholder] = _constant(exported, str(spec.target))
        target = str(spec.target)
        found.append(GraphInput(placeholder, kind, aliases.get(target, target)))
    return found


def _rename(node: fx.Node, name: str) -> None:
    """Give a placeholder a name; an op that has it by chance takes another."""
    taken = {n.name: n for n in node.graph.nodes}
    other = taken.get(name)
    if other is not None and other is not node:
        # Directly: the graph remembers names, also those that are free again.
        other.name = next(n for i in range(len(taken)) if (n := f"{name}_op{i or ''}") not in taken)
    node.name = node.target = name


def _constant(exported: ExportedProgram, target: str) -> torch.Tensor:
    value = exported.constants.get(target)
    if target.rpartition(".")[2].startswith("lifted_tensor") and (value is None or value.is_meta):
        raise CaptureError(
            "the forward makes a tensor from other tensors' values, lost on meta",
            next_step="make it in __init__ and register it with register_buffer, or use torch.full "
            "and torch.stack",
        )
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise CaptureError(
            f"the forward reads the tensor attribute {target!r}, "
            "which is neither a parameter nor a buffer",
            next_step="register it with register_buffer",
        )
    return value


def _symbols(
    graph: fx.Graph, inputs: list[GraphInput], tensors: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, int]]:
    """The symbols of batch and sequence, and the sizes of the example."""
    batched = {i.name for i in inputs if i.kind == "input" and i.batch_dim == 0}
    symbols: dict[str, Any] = {}
    sizes: dict[str, int] = {"batch": batch_size(tensors)}
    lengths = {
        v.shape[1] for v in tensors.values() if v.dim() >= 2 and v.shape[0] == sizes["batch"]
    }
    if len(lengths) == 1 and any(map(_is_sequence, tensors.values())):
        sizes["sequence"] = int(next(iter(lengths)))
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name not in batched or not isinstance(value, torch.Tensor):
            continue
        for dim, label in ((0, "batch"), (1, "sequence")):
            size: Any = value.shape[dim] if value.dim() > dim else None
            if isinstance(size, torch.SymInt):
                symbols.setdefault(label, size.node.expr)
    return symbols, sizes


def _is_sequence(value: torch.Tensor) -> bool:
    """Whether dim 1 counts positions: of [batch, sequence] of tokens, or of [batch, sequence,
    width]; an image has channels there, and a row of numbers has features."""
    return value.dim() == 3 or (value.dim() == 2 and not value.is_floating_point())


def _trained(inputs: list[GraphInput], model: nn.Module) -> set[str]:
    """Names of the placeholders that are trained."""
    trainable = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    return {i.name for i in inputs if i.kind == "parameter" and i.target in trainable}


def _kept(graph: fx.Graph, updates: Iterable[fx.Node]) -> list[fx.Node]:
    """The new values of buffers: no gradient goes through them into the next step."""
    found = []
    for value in updates:
        if value.meta["requires_grad"]:
            # In the block that makes it: a copy stands at the end of the graph.
            source = value.args[0] if value.target is torch.ops.aten.clone.default else value
            assert isinstance(source, fx.Node)
            with graph.inserting_after(source):
                cut = detached(graph, source, source)
            if source is not value:
                with graph.inserting_after(cut):
                    value = graph.call_function(torch.ops.aten.clone.default, (cut,))
                value.meta = dict(cut.meta)
            else:
                value = cut
        found.append(value)
    return found


def _mark_gradients(graph: fx.Graph, roots: set[str]) -> None:
    """meta["requires_grad"] on every node: floating, and reached by a trainable parameter."""
    for node in graph.nodes:
        value = node.meta.get("val")
        floating = isinstance(value, torch.Tensor) and is_differentiable(value)
        floating = floating or isinstance(value, list | tuple)
        if node.op == "placeholder":
            node.meta["requires_grad"] = node.name in roots
        else:
            reached = any(n.meta.get("requires_grad", False) for n in node.all_input_nodes)
            cut = node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
            cut = cut or runs_without_gradient(node)
            node.meta["requires_grad"] = bool(floating and reached and not cut)


def parameter_aliases(model: nn.Module) -> dict[str, str]:
    """Every parameter name -> the first name of the same tensor (ties)."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(p), name)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
