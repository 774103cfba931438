"""nn.Module + example inputs -> Program, by torch.export on meta: nothing is allocated."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind

from autopar.errors import CaptureError
from autopar.passes.analysis.aliases import memory_roots, read_later, written
from autopar.program import GraphInput, Program, is_differentiable, module_path, user_line

Inputs = Mapping[str, Any] | Sequence[Any]
_KINDS = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


def capture(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    name: str = "",
    dtype: torch.dtype | None = None,
) -> Program:
    """Capture the forward of `model` in its present mode as one graph that ends in a scalar loss.

    `example_inputs`: keyword inputs as a mapping, or positional ones as a sequence; tensors that
    share the size of dim 0 form the batch. `dtype`: compute dtype of the floating parameters
    (buffers keep theirs). Batch and sequence become symbols where torch.export allows.
    Raises `CaptureError` naming the module, the user's line and what to do.
    """
    args, kwargs = split_inputs(example_inputs)
    twin = meta_twin(model, dtype)
    config = getattr(twin, "config", None)
    if getattr(config, "use_cache", False):
        # Generation's cache is no part of a training step, and torch.export can't return it.
        config.use_cache = False  # type: ignore[union-attr]
    args, kwargs = _to_meta(args), _to_meta(kwargs)
    failure: Exception | None = None
    for dims in _dynamic_candidates(args, kwargs):
        try:
            exported = _export(twin, args, kwargs, dims)
            break
        except Exception as error:
            failure = error
    else:
        raise _explain(model, failure)
    return _to_program(exported, model, name or type(model).__name__, args, kwargs, dims)


def split_inputs(example_inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword parts of what the user gave."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    raise CaptureError(
        f"example_inputs is a {type(example_inputs).__name__}",
        next_step="give a dict of keyword tensors or a tuple of positional ones",
    )


def meta_twin(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of the model whose tensors all live on the meta device; ties are kept."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        twin = torch.empty_like(parameter, device="meta", dtype=kind)
        memo[id(parameter)] = nn.Parameter(twin, requires_grad=parameter.requires_grad)
    for module in model.modules():
        tensors = [*module._buffers.values()]
        tensors += [v for v in vars(module).values() if isinstance(v, torch.Tensor)]
        for tensor in tensors:
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().to("meta")
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} can't be copied: {error}",
            next_step="remove what copy.deepcopy refuses (locks, files, hooks) from the module",
        ) from error


def _to_meta(value: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda v: v.to("meta") if isinstance(v, torch.Tensor) else v, value
    )


def _dynamic_candidates(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What to try, most symbolic first: batch and sequence, batch alone, all static."""
    leaves = [v for v in [*args, *kwargs.values()] if isinstance(v, torch.Tensor)]
    batch = batch_size(args, kwargs)
    sequences = {v.shape[1] for v in leaves if v.dim() >= 2 and v.shape[0] == batch}
    candidates: list[Any] = []

    def dims(with_sequence: bool) -> Any:
        def of(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.dim() == 0 or value.shape[0] != batch:
                return None
            found = {0: Dim("batch", min=2)}
            if with_sequence and value.dim() >= 2:
                found[1] = Dim("sequence", min=2)
            return found

        if kwargs:
            return {k: of(v) for k, v in kwargs.items()}
        return tuple(of(v) for v in args)

    if batch >= 2:
        integers = all(not v.is_floating_point() for v in leaves)
        if integers and len(sequences) == 1 and min(sequences) >= 2:
            candidates.append(dims(True))
        candidates.append(dims(False))
    return [*candidates, None]


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Size of dim 0 that the tensors share; the first tensor's when they differ."""
    sizes = [
        v.shape[0] for v in [*args, *kwargs.values()] if isinstance(v, torch.Tensor) and v.dim()
    ]
    if not sizes:
        raise CaptureError(
            "no tensor among the example inputs", next_step="give at least one batched tensor"
        )
    return int(max(set(sizes), key=sizes.count))


def _export(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dims: Any
) -> ExportedProgram:
    # What libraries say while a model is traced is about tracing, not about the user's run.
    talkative = logging.getLogger("transformers")
    level = talkative.level
    talkative.setLevel(logging.ERROR)
    try:
        return _export_quietly(model, args, kwargs, dims)
    finally:
        talkative.setLevel(level)


def _export_quietly(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dims: Any
) -> ExportedProgram:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, args, kwargs, dynamic_shapes=dims, strict=False)


def _explain(model: nn.Module, error: Exception | None) -> CaptureError:
    """Module path and user line of what torch.export refused."""
    text = str(error).strip().splitlines() or [type(error).__name__]
    line, path = "", ""
    frame = error.__traceback__ if error else None
    modules = {id(m): n for n, m in model.named_modules()}
    classes = {type(m): n for n, m in model.named_modules()}
    while frame:
        file = frame.tb_frame.f_code.co_filename
        owner = frame.tb_frame.f_locals.get("self")
        inside_torch = "/torch/" in file
        if isinstance(owner, nn.Module) and not inside_torch:
            path = modules.get(id(owner)) or classes.get(type(owner), path)
            line = f"{file}:{frame.tb_lineno}"
        elif not inside_torch and "autopar" not in file and "/passes/" not in file:
            line = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    step = (
        "make that line free of Python control flow on tensor values "
        "(use torch.where or torch.cond) and of .item()/.tolist(); return a scalar loss"
    )
    if "same device" in text[0]:
        step = (
            "register constant tensors with register_buffer, and make others on the device of an "
            "input (device=x.device): the model is captured on the meta device"
        )
    where = f"module {path or '(root)'!r}" + (f", at {line}" if line else "")
    return CaptureError(
        f"{type(model).__name__} can't be captured as one graph: {where}: {text[0][:300]}",
        next_step=step,
    )


def _to_program(
    exported: ExportedProgram,
    model: nn.Module,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: Any,
) -> Program:
    batch = batch_size(args, kwargs)
    user_values = [v for v in torch.utils._pytree.tree_leaves((args, kwargs))]
    aliases = parameter_aliases(model)
    inputs: list[GraphInput] = []
    user_index = 0
    used_constants: dict[str, torch.Tensor] = {}
    for spec in exported.graph_signature.input_specs:
        kind = _KINDS.get(spec.kind)
        placeholder = spec.arg.name
        if kind is None:
            raise CaptureError(
                f"the graph has an input of kind {spec.kind.name} ({placeholder})",
                next_step="keep custom objects out of the forward",
            )
        if kind == "input":
            value = user_values[user_index] if user_index < len(user_values) else None
            user_index += 1
            split = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == batch
            inputs.append(GraphInput(placeholder, kind, placeholder, 0 if split else -1))
            continue
        if kind == "constant":
            used_constants[placeholder] = _constant(exported, str(spec.target))
        target = str(spec.target)
        inputs.append(GraphInput(placeholder, kind, aliases.get(target, target)))
    _refuse_regions(exported.graph)
    loss = _loss_output(exported)
    module = fx.GraphModule(torch.nn.Module(), exported.graph)
    symbols, sizes = _symbols(module.graph, inputs, args, kwargs)
    _mark_gradients(module.graph, inputs, model)
    _refuse_mutation(module.graph, inputs)
    output = module.graph.output_node()
    keep = next(n for n in module.graph.nodes if n.name == loss)
    output.args = ((keep,),)
    return Program(
        name=name,
        graph_module=module,
        inputs=tuple(inputs),
        loss=loss,
        symbols=symbols,
        sizes=sizes,
        aliases=aliases,
        constants=used_constants,
    )


def _constant(exported: ExportedProgram, target: str) -> torch.Tensor:
    value = exported.constants.get(target)
    if target.startswith("lifted_tensor") and (value is None or value.is_meta):
        raise CaptureError(
            "the forward makes a tensor from Python numbers (torch.tensor), lost on meta",
            next_step="make it in __init__ and register it with register_buffer, or use torch.full",
        )
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise CaptureError(
            f"the forward reads the tensor attribute {target!r}, "
            "which is neither a parameter nor a buffer",
            next_step="register it with register_buffer",
        )
    return value


def _refuse_regions(graph: fx.Graph) -> None:
    """Regions of their own (no_grad, checkpoint, cond) are not rewritten."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            raise CaptureError(
                f"module {module_path(node) or '(root)'!r} has a region {node.target} "
                f"({user_line(node)})",
                next_step="take no_grad (use detach), torch.utils.checkpoint (the planner decides "
                "recomputation), autocast and torch.cond out of the forward",
            )


def _refuse_mutation(graph: fx.Graph, inputs: Sequence[GraphInput]) -> None:
    """No write into state, or into a value with gradient whose memory has a second reader.

    The rewrites give a rank its own copy of a value: a write into one would not reach the others.
    """
    outside = {i.name: i.target for i in inputs}
    order = {n: i for i, n in enumerate(graph.nodes)}
    roots = memory_roots(graph)
    for node in graph.nodes:
        for changed in written(node):
            root = roots[changed]
            if root.name in outside:
                raise CaptureError(
                    f"the forward changes {outside[root.name]!r} in place ({user_line(node)})",
                    next_step="freeze it (for batch norm: eval() that layer) "
                    "or compute it outside the model",
                )
            if node.meta["requires_grad"] and read_later(node, changed, roots, order):
                raise CaptureError(
                    f"the forward writes into {changed.name!r} in place and reads the same memory "
                    f"later under another name ({user_line(node)})",
                    next_step="use the form of that operation that returns a new tensor",
                )


def _loss_output(exported: ExportedProgram) -> str:
    """Name of the output that is the loss: the first floating scalar."""
    by_name = {n.name: n for n in exported.graph.nodes}
    for spec in exported.graph_signature.output_specs:
        node = by_name.get(getattr(spec.arg, "name", ""))
        value = node.meta.get("val") if node is not None else None
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point():
            return str(spec.arg.name)
    raise CaptureError(
        "no output of the model is a scalar loss",
        next_step="pass labels in example_inputs, or wrap the model in one that returns the loss",
    )


def _symbols(
    graph: fx.Graph, inputs: list[GraphInput], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, int]]:
    """The symbols of batch and sequence, and the sizes of the example."""
    batched = {i.name for i in inputs if i.kind == "input" and i.batch_dim == 0}
    symbols: dict[str, Any] = {}
    sizes: dict[str, int] = {"batch": batch_size(args, kwargs)}
    leaves = [
        v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)
    ]
    lengths = {v.shape[1] for v in leaves if v.dim() >= 2 and v.shape[0] == sizes["batch"]}
    if len(lengths) == 1:
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


def _mark_gradients(graph: fx.Graph, inputs: list[GraphInput], model: nn.Module) -> None:
    """meta["requires_grad"] on every node: floating, and reached by a trainable parameter."""
    trainable = {n for n, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    roots = {i.name for i in inputs if i.kind == "parameter" and i.target in trainable}
    for node in graph.nodes:
        value = node.meta.get("val")
        floating = isinstance(value, torch.Tensor) and is_differentiable(value)
        floating = floating or isinstance(value, list | tuple)
        if node.op == "placeholder":
            node.meta["requires_grad"] = node.name in roots
        else:
            reached = any(n.meta.get("requires_grad", False) for n in node.all_input_nodes)
            cut = node.target in (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)
            node.meta["requires_grad"] = bool(floating and reached and not cut)


def parameter_aliases(model: nn.Module) -> dict[str, str]:
    """Every parameter name -> the first name of the same tensor (ties)."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(p), name)
        for name, p in model.named_parameters(remove_duplicate=False)
    }
