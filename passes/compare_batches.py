"""A batch that torch.export fixes to a number: which of the graph's numbers are made of it.

The model is captured at several sizes, and the graphs are compared. A number that grows with the
batch by whole steps is written as a size; one that stays is a constant:

    batch 4   view(x, [4, 2, 3])    sum / 4       view(x, [4, -1])
    batch 5   view(x, [5, 2, 3])    sum / 5       view(x, [4, -1])
    result    view(x, [b, 2, 3])    sum / b       view(x, [4, -1])

What else differs can't be told apart from the batch: it stays whole then, and the program says why.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils import _pytree as pytree

from autopar.errors import AutoparError
from autopar.inputs import flatten_inputs, replace_tensors
from autopar.op_call import Bindings
from autopar.program import Program, module_path, tensors_of, user_line

# (size, whether a symbol may be tried) -> the program of a batch of that size.
CaptureAt = Callable[[int, bool], Program]
# The example size of the symbol: no guess about shapes comes true by chance for a large prime.
_UNLIKELY = 1_000_003


def resized(inputs: Mapping[str, Any], rows: int, size: int) -> dict[str, Any]:
    """The inputs with `size` rows, on meta, for all tensors whose dim 0 has `rows`."""

    def make(value: torch.Tensor) -> torch.Tensor:
        if not value.dim() or value.shape[0] != rows:
            return value
        return value.new_empty((size, *value.shape[1:]), device="meta")

    found: dict[str, Any] = replace_tensors(dict(inputs), make)
    # A batch that was fixed to a number by its user, and not by torch.export.
    assert flatten_inputs(found)[1].keys() == flatten_inputs(inputs)[1].keys()
    return found


def with_batch_symbol(program: Program, capture_at: CaptureAt) -> Program:
    """The program with its batch as a symbol, or with the reason why the batch stays whole.

    Each number of the graph has to be the same linear function of the batch at all sizes that are
    tried.
    """
    batch = program.sizes["batch"]
    if batch == 1:
        # torch.export never makes a size of 1 a symbol.
        return _of_more_samples(program, capture_at)
    programs = {batch: program}
    # One more: what needs a multiple. Many and few: where a bound is.
    for size in (batch + 1, 16 * batch + 3, *([2] if batch > 3 else [])):
        try:
            programs[size] = capture_at(size, False)
        except AutoparError as error:
            return _whole(program, f"a batch of {size} can't be captured: {error.message}")
        if reason := _difference(programs):
            return _whole(program, reason)
    return _symbolic(programs) or _whole(program, "the graph's sizes are no function of the batch")


def _of_more_samples(program: Program, capture_at: CaptureAt) -> Program:
    try:
        several = capture_at(2, True)
    except AutoparError as error:
        return _whole(program, f"a batch of 2 can't be captured: {error.message}")
    if "batch" not in several.symbols:
        several = with_batch_symbol(several, capture_at)
    if several.batch_stays_whole:
        return replace(program, batch_stays_whole=several.batch_stays_whole)
    return replace(several, sizes={**several.sizes, "batch": 1})


def _whole(program: Program, reason: str) -> Program:
    text = f"torch.export fixes the batch, and {reason}"
    batched = [i.name for i in program.of_kind("input") if i.batch_dim == 0]
    if len(batched) > 1:
        # A mask of as many tokens as there are samples looks batched too.
        text += f" (taken as batched, by dim 0 of {program.sizes['batch']}: {', '.join(batched)})"
    return replace(program, batch_stays_whole=text)


def _difference(programs: Mapping[int, Program]) -> str:
    """Where graphs of several batch sizes differ otherwise than in linear sizes; '' if nowhere."""
    sizes = list(programs)
    graphs = [list(p.graph.nodes) for p in programs.values()]
    orders = [{n: i for i, n in enumerate(nodes)} for nodes in graphs]
    for nodes in zip(*graphs, strict=False):
        lists = [_described(n, order) for n, order in zip(nodes, orders, strict=True)]
        if len({str(spec) for _, spec in lists}) > 1:
            return _between(sizes, nodes)
        for found in zip(*(leaves for leaves, _ in lists), strict=True):
            if _linear(sizes, found) is None and not _alike(found):
                return _between(sizes, nodes)
    if len({len(nodes) for nodes in graphs}) > 1:
        return f"graphs of batches {sizes} have {[len(n) for n in graphs]} ops"
    first = next(iter(programs.values()))
    for other in programs.values():
        if other.updates != first.updates or other.inputs != first.inputs:
            return f"graphs of batches {sizes} have other inputs"
        for name, value in first.constants.items():
            if not _equal(value, other.constants[name]):
                return f"a constant of the forward differs for batches {sizes}"
    return ""


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _between(sizes: Sequence[int], nodes: Sequence[fx.Node]) -> str:
    node = nodes[0]
    where = user_line(node) or module_path(node) or node.name
    return f"{node.name} differs between batches of {sizes[0]} and {sizes[-1]} samples ({where})"


def _described(node: fx.Node, order: Mapping[fx.Node, int]) -> tuple[list[Any], Any]:
    """All that makes a node what it is, as leaves and their structure."""
    args = fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"node {order[n]}")
    value = node.meta.get("val")
    types = [
        (str(t.dtype), list(t.shape), list(t.stride()), t.storage_offset())
        if isinstance(t, torch.Tensor)
        else t
        for t in pytree.tree_leaves(value)
    ]
    target = node.target if node.op != "output" else ""
    grad = bool(node.meta.get("requires_grad"))
    leaves, spec = pytree.tree_flatten([node.op, str(target), grad, args, types])
    return leaves, spec


def _alike(values: Sequence[Any]) -> bool:
    first = values[0]
    if isinstance(first, float) and math.isnan(first):
        return all(isinstance(v, float) and math.isnan(v) for v in values)
    return all(type(v) is type(first) and bool(v == first) for v in values)


def _linear(sizes: Sequence[int], values: Sequence[Any]) -> tuple[int, int] | None:
    """(step, start) of values = step x size + start, or None."""
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        return None
    step, rest = divmod(values[1] - values[0], sizes[1] - sizes[0])
    start = values[0] - step * sizes[0]
    fits = not rest and all(v == step * s + start for s, v in zip(sizes, values, strict=True))
    return (int(step), int(start)) if fits else None


def _symbolic(programs: Mapping[int, Program]) -> Program | None:
    """The first program, rewritten so that its batch is a symbol. None if sizes do not fit."""
    sizes, (program, *_) = list(programs), list(programs.values())
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    example = mode.from_tensor(torch.empty(_UNLIKELY, device="meta"), symbolic_context=context)
    batch: Any = example.shape[0]
    inputs = {i.name for i in program.of_kind("input") if i.batch_dim == 0}
    graph = program.graph
    placeholders = graph.find_nodes(op="placeholder")
    source = next(n for n in placeholders if n.name in inputs)
    values = _Sizes(graph, source, placeholders[-1], batch)
    columns = list(zip(*(list(p.graph.nodes) for p in programs.values()), strict=True))
    for nodes in columns:
        leaves = zip(*(pytree.tree_leaves(list(_arguments(n))) for n in nodes), strict=True)
        made = [values.node(_linear(sizes, found), found[0]) for found in leaves]
        spec = pytree.tree_structure(list(_arguments(nodes[0])))
        nodes[0].args, nodes[0].kwargs = pytree.tree_unflatten(made, spec)
    for nodes in columns:
        tensors = [pytree.tree_leaves(n.meta.get("val")) for n in nodes]
        made = [_typed(sizes, found, batch, mode) for found in zip(*tensors, strict=True)]
        spec = pytree.tree_structure(nodes[0].meta.get("val"))
        nodes[0].meta["val"] = pytree.tree_unflatten(made, spec)
    graph.lint()
    program.graph_module.recompile()
    # A symbol that torch came to take for a number would show here.
    symbol = batch.node.expr
    fits = all(
        _shapes(nodes[0], {"batch": symbol}, size) == _shapes(nodes[at], {}, size)
        for nodes in columns
        for at, size in enumerate(sizes)
        if at
    )
    return replace(program, symbols={"batch": symbol}) if fits else None


def _shapes(node: fx.Node, symbols: Mapping[str, Any], batch: int) -> list[tuple[int, ...]]:
    bindings = Bindings(symbols, {"batch": batch})
    return [bindings.shape(t) for t in tensors_of(node.meta.get("val"))]


def _typed(sizes: Sequence[int], values: Sequence[Any], batch: Any, mode: FakeTensorMode) -> Any:
    """A tensor of the shape that follows from the batch; what is no tensor as it is."""
    first = values[0]
    if not isinstance(first, torch.Tensor):
        return first

    def sizes_of(of: Callable[[torch.Tensor], Sequence[int]]) -> list[Any]:
        lines = [_linear(sizes, column) for column in zip(*map(of, values), strict=True)]
        return [line[0] * batch + line[1] if line[0] else line[1] for line in lines if line]

    shape, stride = sizes_of(lambda t: list(t.shape)), sizes_of(lambda t: list(t.stride()))
    with mode:
        return torch.empty_strided(shape, stride, dtype=first.dtype, device=first.device)


def _arguments(node: fx.Node) -> tuple[Any, Any]:
    """As plain containers, that a tree can be made of again."""
    plain = fx.map_arg((node.args, dict(node.kwargs)), lambda n: n)
    return plain[0], plain[1]


class _Sizes:
    """Nodes for numbers that are made of the batch, each once, ahead of all ops."""

    def __init__(self, graph: fx.Graph, source: fx.Node, after: fx.Node, batch: Any) -> None:
        self._graph, self._source, self._after, self._batch = graph, source, after, batch
        self._made: dict[tuple[int, int], fx.Node] = {}

    def node(self, line: tuple[int, int] | None, constant: Any) -> Any:
        """The node of step x batch + start; what does not depend on the batch as it is."""
        if line is None or not line[0]:
            return constant
        step, start = line
        if line not in self._made:
            if line == (1, 0):
                size: Any = torch.ops.aten.sym_size.int
                made = self._call(size, (self._source, 0), self._batch)
            elif start:
                scaled = self.node((step, 0), None)
                made = self._call(operator.add, (scaled, start), step * self._batch + start)
            else:
                made = self._call(operator.mul, (self.node((1, 0), None), step), step * self._batch)
            self._made[line] = made
        return self._made[line]

    def _call(self, target: Callable[..., Any], args: tuple[Any, ...], value: Any) -> fx.Node:
        with self._graph.inserting_after(self._after):
            made = self._graph.call_function(target, args)
        made.meta = {"val": value, "requires_grad": False}
        self._after = made
        return made
