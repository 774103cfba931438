"""The one IR: a captured `torch.fx` graph with typed access to what the passes know about it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import prod
from types import FunctionType
from typing import Any

import torch
from torch import fx

from autopar.late_graph import LateGraphModule


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One placeholder: `kind` is parameter, buffer, constant or input; `target` its name outside.

    For an input, `batch_dim` is 0 when the tensor is split into micro-batches along dim 0 and -1
    when every micro-batch sees it whole.
    """

    name: str
    kind: str
    target: str
    batch_dim: int = -1


@dataclass(frozen=True, slots=True)
class TensorType:
    """Concrete shape, dtype and whether autograd reaches it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(slots=True)
class Program:
    """A forward graph that ends in a scalar loss.

    `symbols` maps `batch`/`sequence` to the symbol of the graph's shapes (absent when static);
    `batch_stays_whole`: why the loss of a batch does not follow from those of its parts, or ''.
    `one_micro_batch`: why all samples of a step must pass together, spread over dp ranks or not, or
    ''; the ranks then take the mean of what the nodes named in `batch_statistics` compute, or the
    sum of those that are in `batch_sums`.
    `sizes` holds the sizes the shapes are bound to (from the example, or from the plan).
    `parameters` maps each fully qualified name to (shape, dtype as stored, trainable); tied names
    are aliases. `fixed`: inputs of the example that are no tensors; the graph holds for them only.
    `expert_load`: shares of the rows of a layer's experts that prices assume, by their module.
    `notes`: what capture assumed. `updates`: buffers that a step changes; the graph returns their
    new values after the loss, in this order.
    """

    name: str
    graph_module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    loss: str
    symbols: dict[str, Any] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    updates: tuple[str, ...] = ()
    batch_stays_whole: str = ""
    one_micro_batch: str = ""
    batch_statistics: frozenset[str] = frozenset()
    batch_sums: frozenset[str] = frozenset()
    expert_load: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.graph_module.graph

    @property
    def is_static(self) -> bool:
        return not self.symbols

    def input(self, name: str) -> GraphInput:
        return next(i for i in self.inputs if i.name == name)

    def of_kind(self, kind: str) -> tuple[GraphInput, ...]:
        return tuple(i for i in self.inputs if i.kind == kind)

    def scalar_parameter(self) -> str:
        """A parameter of no dims, or '': ZeRO can't shard one (FSDP2 refuses it)."""
        shapes = {n.name: n.meta["val"].dim() for n in self.graph.find_nodes(op="placeholder")}
        found = (i.target for i in self.of_kind("parameter") if not shapes[i.name])
        return next(found, "")

    def fingerprint(self) -> str:
        """Digest of structure, shapes, names and what is trained; equal for equal programs."""
        digest = hashlib.sha256()
        for item in self.inputs:
            digest.update(f"{item.kind} {item.target}\n".encode())
        order: dict[fx.Node, int] = {}
        symbols = _symbol_names(self)
        for index, node in enumerate(self.graph.nodes):
            order[node] = index
            args = fx.map_arg((node.args, node.kwargs), lambda n: order[n])
            target = _target_name(node.target) if node.op == "call_function" else ""
            digest.update(f"{node.op} {target} ".encode())
            trained = bool(node.meta.get("requires_grad"))
            digest.update(f"{args} {trained} {_shape_text(node, symbols)}\n".encode())
        return digest.hexdigest()[:16]

    def with_graph(self, graph_module: fx.GraphModule, **changes: Any) -> Program:
        return replace(self, graph_module=graph_module, **changes)


def _target_name(target: Any) -> str:
    """The same in every process: the text of a Python function holds its address."""
    if isinstance(target, FunctionType):
        return f"{target.__module__}.{target.__qualname__}"
    return str(target)


def is_differentiable(value: torch.Tensor) -> bool:
    """Whether autograd can reach values of this dtype."""
    return value.is_floating_point() or value.is_complex()


def outputs_of(graph: fx.Graph) -> list[fx.Node]:
    """The values that a graph returns: its output is always one flat tuple."""
    values = graph.output_node().args[0]
    assert isinstance(values, tuple | list)
    return [v for v in values if isinstance(v, fx.Node)]


def copy_graph(graph: fx.GraphModule) -> fx.GraphModule:
    """A copy whose nodes have their own metadata; names are kept and tensors are shared."""
    made = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.graph.nodes:
        values[node] = made.node_copy(node, lambda n: values[n])
        values[node].meta = dict(node.meta)
    root = torch.nn.Module()
    for name, buffer in graph.named_buffers():
        root.register_buffer(name, buffer, persistent=False)
    return LateGraphModule(root, made)


def _symbol_names(program: Program) -> dict[str, str]:
    return {str(symbol): name for name, symbol in program.symbols.items()}


def _shape_text(node: fx.Node, symbols: dict[str, str]) -> str:
    text = []
    for value in tensors_of(node.meta.get("val")):
        sizes = " ".join(str(s) for s in value.shape)
        for symbol, name in symbols.items():
            sizes = sizes.replace(symbol, name)
        text.append(f"{sizes}:{value.dtype}")
    return ",".join(text)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a node's `meta["val"]`: one, several, or none."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [v for v in value if isinstance(v, torch.Tensor)]
    return []


def module_path(node: fx.Node) -> str:
    """Path in the user's model of the innermost module that made this node ('' for the root)."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    return "" if path.startswith("_empty") else str(path)


def module_paths(node: fx.Node) -> Iterable[str]:
    """Paths of all modules around this node, outermost first."""
    for path, _ in (node.meta.get("nn_module_stack") or {}).values():
        yield str(path)


def user_line(node: fx.Node) -> str:
    """`file:line` in the user's code that made this node, or ''."""
    trace = node.meta.get("stack_trace") or ""
    lines = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    # The innermost line that is not torch's own, nor of code that torch has generated.
    own = [line for line in lines if "/torch/" not in line and '"<eval_with_key>' not in line]
    return (own or lines or [""])[-1]
