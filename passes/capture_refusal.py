"""What can't become one graph: the module, the user's line, and the known remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autopar.errors import AutoparError, CaptureError
from autopar.passes.analysis.aliases import memory_roots, read_later, written
from autopar.passes.capture_hooks import REMEDY as HOOK_REMEDY
from autopar.program import GraphInput, module_path, user_line

# What torch says -> what to do; the first that is found in the message counts.
REMEDIES: tuple[tuple[str, str], ...] = (
    (r"^GradientHook", HOOK_REMEDY),
    (
        r"^PythonChance",
        "draw it by torch (torch.rand on the device of an input, and torch.where instead of if), "
        "or in the data loader and pass it as an input",
    ),
    (
        r"^InnerBackward .*vmap",
        "write it with ops that take a batch: linear and matmul take leading dims, else einsum",
    ),
    (
        r"^InnerBackward",
        "write that derivative out by hand, or as the backward of a torch.autograd.Function",
    ),
    (
        r"PackedSequence|batch_sizes should",
        "give padded sequences and a mask: a packed sequence has a size that depends on values",
    ),
    (
        r"FlexAttention|flex_attention",
        "use scaled_dot_product_attention with attn_mask=, which can be captured and sharded",
    ),
    (
        r"TorchScript|ScriptModule",
        "give the nn.Module itself instead of what torch.jit made of it",
    ),
    (
        r"format string|__format__",
        "a value can't be formatted while there are none: print shapes, or log outside the model",
    ),
    (
        r"fake tensor in the exported program constant",
        "that module makes a tensor by a way torch.export does not follow: register tensors with "
        "register_buffer, and use ops of torch alone",
    ),
    (
        r"torch\.autograd\.Function .* holds its apply",
        "write NAME.apply(...) where it is called, so that the capture sees the function",
    ),
    (
        r"torch\.autograd\.Function",
        "give it tensors and fixed numbers by position and let it return new tensors, or make it "
        "an op: torch.library.custom_op with register_fake and register_autograd "
        "(autopar.register_rule can tell how it is sharded)",
    ),
    (
        r"same device|meta and cpu|cpu and meta",
        "register constant tensors with register_buffer, and make others on the device of an "
        "input (device=x.device): the model is captured on the meta device",
    ),
    (
        r"data-dependent|GuardOnDataDependent|aten\._local_scalar_dense|\.item\(\)|"
        r"is_nonzero|Tensor\.tolist|Cannot copy out of meta",
        "make that line free of Python control flow on tensor values "
        "(use torch.where) and of .item()/.tolist()",
    ),
    (
        r"_ctc_loss",
        "make it an op that returns one loss a sample: torch.library.custom_op around F.ctc_loss "
        "with register_fake and register_autograd; the loss is then its mean or sum",
    ),
    (
        r"nonzero|unique|masked_select|dynamic shape operator|DynamicOutputShape",
        "that op's result has a size that depends on values: use a form with a fixed size "
        "(torch.where with a value, a mask that is multiplied in)",
    ),
    (
        r"numpy|scipy",
        "keep numpy and scipy out of the forward: compute that part in the data loader and pass it "
        "as an input",
    ),
    (
        r"unexpected keyword argument|missing \d+ required|positional argument",
        "call the model on these inputs in Python first: forward does not take them as given",
    ),
)
GENERAL = (
    "run `torch.export.export(model, args, strict=False)` alone: what it can't trace must be "
    "written in ops of torch that it can, or moved out of the model (data loader, loss_fn=)"
)


_OWN_FOLDER = str(Path(__file__).parent.parent)


def explain(model: nn.Module, error: Exception) -> AutoparError:
    """Module path and user line of what torch.export refused; our own errors are clear already."""
    if isinstance(error, AutoparError):
        return error
    text = str(error).strip().splitlines() or [type(error).__name__]
    path, line = _place(model, error.__traceback__)
    if lifted := re.search(r"model attribute: ([\w.]+)\.lifted_tensor", str(error)):
        path, line = lifted[1], ""
    where = f"module {path or '(root)'!r}" + (f", at {line}" if line else "")
    whole = f"{type(error).__name__} {error}"
    step = next((s for pattern, s in REMEDIES if re.search(pattern, whole)), GENERAL)
    return CaptureError(
        f"{type(model).__name__} can't be captured as one graph: {where}: {text[0][:300]}",
        next_step=step,
    )


def _place(model: nn.Module, frame: TracebackType | None) -> tuple[str, str]:
    """The innermost module of the user on the way to an error, and the line it stood at."""
    line, path = "", ""
    # The twin's modules are copies: they are found by their class.
    classes = {type(m): n for n, m in model.named_modules()}
    modules = {id(m): n for n, m in model.named_modules()}
    while frame:
        file = frame.tb_frame.f_code.co_filename
        names = frame.tb_frame.f_code.co_varnames
        owner = frame.tb_frame.f_locals.get(names[0]) if names else None  # mostly called self
        inside_torch = "/torch/" in file
        ours = file.startswith(_OWN_FOLDER)
        if isinstance(owner, nn.Module) and not inside_torch and not ours:
            path = modules.get(id(owner)) or getattr(owner, PATH, classes.get(type(owner), path))
            line = f"{file}:{frame.tb_lineno}"
        elif not inside_torch and not ours:
            line = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    return path, line


# Attribute under which a twin's module knows its path.
PATH = "_autopar_path"


def remember_paths(twin: nn.Module) -> None:
    """So that an error in the twin can name the module, not only a module of the same class."""
    for path, module in twin.named_modules():
        object.__setattr__(module, PATH, path)


# Part of a region's name -> what to do instead.
_REGIONS = {
    "autocast": "take autocast out of the forward: precision= decides",
    "checkpoint": "take torch.utils.checkpoint out of the forward: the planner decides "
    "recomputation",
    "cond": "use torch.where instead of torch.cond",
}


def refuse_regions(graph: fx.Graph) -> None:
    """Regions of their own (checkpoint, autocast, cond) are not rewritten."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            first = _first_inside(node)
            step = next((s for n, s in _REGIONS.items() if n in str(node.target)), None)
            raise CaptureError(
                f"module {module_path(first) or module_path(node) or '(root)'!r} has a region "
                f"{node.target} ({user_line(first) or user_line(node)})",
                next_step=step or f"compute it without {node.target}",
            )


def _first_inside(region: fx.Node) -> fx.Node:
    """The first op of the user inside a region, which itself has no line; else the region."""
    for body in region.all_input_nodes:
        module = getattr(body.graph.owning_module, str(body.target), None)
        if body.op == "get_attr" and isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                if isinstance(node.target, torch._ops.HigherOrderOperator):
                    return _first_inside(node)
                if user_line(node):
                    found: fx.Node = node
                    return found
    return region


def refuse_values(graph: fx.Graph) -> None:
    """No number or size on the way to the loss that is read off a tensor's values."""
    reached: set[fx.Node] = set()
    stack = list(graph.output_node().all_input_nodes)
    while stack:
        node = stack.pop()
        if node in reached:
            continue
        reached.add(node)
        stack += node.all_input_nodes
    for node in graph.nodes:
        if node in reached and free_unbacked_symbols(node.meta.get("val")):
            raise CaptureError(
                f"module {module_path(node) or '(root)'!r}: {node.target} makes a number or a "
                f"size out of a tensor's values ({user_line(node)})",
                next_step="keep it a tensor (no .item()/.tolist()), and use forms of a fixed size "
                "(torch.where, a mask that is multiplied in)",
            )


_ASSIGN = (
    "assign the new value (self.name = ...), freeze it (for batch norm: eval() that layer) or "
    "compute it outside the model"
)
_FOR_STATE = {
    "embedding_renorm_": "leave max_norm out, and shorten long rows between steps: "
    "weight.renorm_(2, 0, max_norm) under no_grad"
}


def refuse_mutation(graph: fx.Graph, inputs: Sequence[GraphInput]) -> None:
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
                    next_step=_FOR_STATE.get(str(getattr(node.target, "_opname", "")), _ASSIGN),
                )
            if node.meta["requires_grad"] and read_later(node, changed, roots, order):
                raise CaptureError(
                    f"the forward writes into {changed.name!r} in place and reads the same memory "
                    f"later under another name ({user_line(node)})",
                    next_step="use the form of that operation that returns a new tensor",
                )
