"""One operator call with concrete shapes: what rules, costs and saved-tensor analysis look at."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.program import TensorType, is_differentiable, module_path


@dataclass(frozen=True, slots=True)
class Operand:
    """Stands for tensor operand number `index` inside `OpCall.args`."""

    index: int


@dataclass(frozen=True, slots=True)
class Fusion:
    """What an op of a fused kernel still moves: operands `reads` (by index) come from memory,
    `writes` its results go there; the others stay in registers. `starts`: the kernel's start is
    charged to this op."""

    reads: tuple[int, ...]
    writes: bool
    starts: bool


@dataclass(frozen=True, slots=True)
class OpCall:
    """`operands[i]` is the name of the node that gives operand i, `types[i]` its type.

    A node that occurs twice in the arguments is one operand. Sizes in `args` are concrete.
    `copies`: the result is new memory although the op only rearranges (reshape of a strided
    tensor). `expert_load`: shares of the rows of each expert, of every layer that the call stands
    for. `fusion`: its part of a kernel that torch.compile would make of several ops.
    """

    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    operands: tuple[str, ...]
    types: tuple[TensorType, ...]
    results: tuple[TensorType, ...]
    path: str = ""
    copies: bool = False
    fusion: Fusion | None = None
    expert_load: tuple[tuple[float, ...], ...] = ()

    @property
    def op_name(self) -> str:
        """`linear`, `add_`, `getitem`: the packet's name without namespace and overload."""
        if isinstance(self.target, torch._ops.OpOverload):
            return str(self.target._opname)
        return getattr(self.target, "__name__", str(self.target))

    @property
    def result(self) -> TensorType:
        return self.results[0]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or keyword, or the default."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def named(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the op's schema: as given, else the schema's default; the
        default given here where the op has no such argument."""
        if name in self.kwargs:
            return self.kwargs[name]
        for position, argument in enumerate(_arguments(self.target)):
            if argument.name == name:
                return self.args[position] if position < len(self.args) else argument.default_value
        return default

    @property
    def registered_name(self) -> str:
        """`mylib::op`, or the bare name of a Python function."""
        schema = getattr(self.target, "_schema", None)
        return str(schema.name) if schema is not None else self.op_name

    @property
    def overload(self) -> str:
        """`default`, `Tensor`, `dim`; empty for a Python function."""
        return str(getattr(self.target, "_overloadname", ""))

    @property
    def writes_in_place(self) -> bool:
        schema = getattr(self.target, "_schema", None)
        return schema is not None and bool(schema.is_mutable)


def _arguments(target: Any) -> list[Any]:
    schema = getattr(target, "_schema", None)
    return list(schema.arguments) if schema is not None else []


_NUMBERS = (torch.SymInt, torch.SymFloat, int, float, bool)


class Bindings:
    """Sizes for the symbols of a program; evaluates symbolic sizes, each expression once."""

    def __init__(self, symbols: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self._values = {symbols[k]: v for k, v in sizes.items() if k in symbols}
        self._cache: dict[Any, Any] = {}

    def size(self, value: Any) -> Any:
        """A size as an int; values that are no sizes come back as they are."""
        if not isinstance(value, torch.SymInt | torch.SymFloat):
            return value
        expr = value.node.expr
        if expr not in self._cache:
            found = expr.subs(self._values)
            self._cache[expr] = int(found) if isinstance(value, torch.SymInt) else float(found)
        return self._cache[expr]

    def shape(self, value: torch.Tensor) -> tuple[int, ...]:
        return tuple(int(self.size(s)) for s in value.shape)


# For graphs whose sizes are numbers already.
STATIC = Bindings({}, {})


def types_of(node: fx.Node, bindings: Bindings) -> tuple[TensorType, ...]:
    """Concrete types of a node's results (empty when it yields no tensor)."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    grad = bool(node.meta.get("requires_grad", False))
    return tuple(
        TensorType(bindings.shape(v), v.dtype, grad and is_differentiable(v))
        for v in values
        if isinstance(v, torch.Tensor)
    )


def op_call(node: fx.Node, bindings: Bindings) -> OpCall:
    """The call at a `call_function` node, with sizes bound."""
    operands: dict[str, int] = {}
    types: list[TensorType] = []

    def convert(arg: Any) -> Any:
        if isinstance(arg, fx.Node):
            value = arg.meta.get("val")
            if isinstance(value, _NUMBERS) or value is None:
                return bindings.size(value)
            if arg.name not in operands:
                operands[arg.name] = len(types)
                found = types_of(arg, bindings)
                index = node.args[1] if node.target is operator.getitem else 0
                types.append(found[int(index)] if isinstance(index, int) else found[0])
            return Operand(operands[arg.name])
        if isinstance(arg, list | tuple):
            return type(arg)(convert(a) for a in arg)
        return bindings.size(arg)

    args = tuple(convert(a) for a in node.args)
    kwargs = {k: convert(v) for k, v in node.kwargs.items()}
    return OpCall(
        node.name,
        node.target,
        args,
        kwargs,
        tuple(operands),
        tuple(types),
        types_of(node, bindings),
        module_path(node),
        copies_memory(node, bindings),
        node.meta.get("fusion"),
        node.meta.get("expert_load", ()),
    )


def copies_memory(node: fx.Node, bindings: Bindings) -> bool:
    """Whether an op that rearranges has to move memory, as its input is not in row-major order."""
    if "copies" in node.meta:
        return bool(node.meta["copies"])
    name = getattr(node.target, "_opname", "")
    if name in ("clone", "cat", "stack", "pad"):
        return True
    if name not in ("reshape", "contiguous", "flatten", "reshape_as"):
        return False
    source = node.args[0]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor):
        return False
    expected = 1
    for size, stride in zip(
        reversed(bindings.shape(value)),
        reversed([bindings.size(s) for s in value.stride()]),
        strict=True,
    ):
        if size != 1 and stride != expected:
            return True
        expected *= size
    return False
