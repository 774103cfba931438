"""Split a product whose result is cut into parts: each part gets its columns of the weight.

qkv = linear(x, w)                      q = linear(x, w[0:768])
q, k, v = split(qkv, 768, -1)    ->     k = linear(x, w[768:1536])
                                        v = linear(x, w[1536:2304])

An even shard of the fused result would hold no whole head of any part; the parts are sharded by
heads like separate projections (Megatron-LM reorders the fused weight to the same end). The user's
model keeps its parameter: only the program computes with pieces of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.marks import REPLICATE
from autopar.parts import Parts
from autopar.passes.rewrite.simplify import drop_unused
from autopar.piece_name import Piece
from autopar.program import GraphInput, Program, copy_graph, tensors_of

Interval = tuple[int, int]
# op: argument positions of weight and bias, and the weight's dim of outputs.
_PRODUCTS: dict[str, tuple[int, int | None, int]] = {
    "linear": (1, 2, 0),
    "addmm": (2, 0, 1),
    "mm": (1, None, 1),
}
_SPLIT = ("self", "sizes", "dim")
_RESHAPES = frozenset(["view", "reshape", "_unsafe_view"])


@dataclass(frozen=True)
class SplitFused:
    name: str = "split-fused"

    def run(self, parts: Parts) -> Parts:
        program = parts.program
        found = [f for n in program.graph.nodes if (f := _fused(n, program)) is not None]
        if not found:
            return parts
        program = program.with_graph(copy_graph(program.graph_module))
        nodes = {n.name: n for n in program.graph.nodes}
        pieces: dict[str, list[GraphInput]] = {}
        for each in found:
            _split(program, each.on(nodes), pieces)
        # The whole parameters are still there, unread: `drop_unused` takes them out.
        inputs = [p for item in program.inputs for p in (*pieces.get(item.name, ()), item)]
        program.graph_module.recompile()
        changed = program.with_graph(program.graph_module, inputs=tuple(inputs))
        return parts.evolve(program=drop_unused(changed))


@dataclass(frozen=True)
class _Fused:
    """A product, the reshapes after it that keep its last dim, and who reads which interval."""

    product: fx.Node
    reshapes: tuple[fx.Node, ...]
    readers: tuple[tuple[fx.Node, Interval], ...]

    @property
    def intervals(self) -> list[Interval]:
        return sorted({interval for _, interval in self.readers})

    def on(self, nodes: dict[str, fx.Node]) -> _Fused:
        """The same in a copy of the graph."""
        return _Fused(
            nodes[self.product.name],
            tuple(nodes[n.name] for n in self.reshapes),
            tuple((nodes[n.name], interval) for n, interval in self.readers),
        )


def _fused(node: fx.Node, program: Program) -> _Fused | None:
    """The pattern at a node, when everything about it is as in the text above."""
    known = _PRODUCTS.get(getattr(node.target, "_opname", ""))
    if known is None or node.kwargs or node.meta.get(REPLICATE):
        return None
    weight_at, bias_at, dim = known
    kinds = {i.name: i.kind for i in program.inputs}
    weight = node.args[weight_at]
    bias = node.args[bias_at] if bias_at is not None and len(node.args) > bias_at else None
    for operand in (weight, bias):
        if operand is None:
            continue
        if not isinstance(operand, fx.Node) or kinds.get(operand.name) != "parameter":
            return None
        if len(operand.users) != 1:
            return None
    assert isinstance(weight, fx.Node)
    shape = weight.meta["val"].shape
    bias_dims = bias.meta["val"].dim() if isinstance(bias, fx.Node) else 1
    if len(shape) != 2 or bias_dims != 1 or not isinstance(shape[dim], int):
        return None
    width = shape[dim]
    reshapes, end = [], node
    while len(end.users) == 1 and _keeps_last(next(iter(end.users)), width):
        end = next(iter(end.users))
        reshapes.append(end)
    readers = list(_readers(end, width))
    if any(interval is None for _, interval in readers):
        return None
    found = _Fused(node, tuple(reshapes), tuple((n, i) for n, i in readers if i is not None))
    edges = [0, *(stop for _, stop in found.intervals)]
    covers = [(a, b) for a, b in zip(edges, edges[1:], strict=False)] == found.intervals
    return found if covers and len(found.intervals) > 1 and edges[-1] == width else None


def _keeps_last(node: fx.Node, width: int) -> bool:
    if getattr(node.target, "_opname", "") not in _RESHAPES:
        return False
    return bool(node.meta["val"].shape[-1] == width)


def _readers(node: fx.Node, width: int) -> Iterator[tuple[fx.Node, Interval | None]]:
    """Nodes that hold one part, with their interval; None where a user is anything else."""
    rank = node.meta["val"].dim()
    for user in node.users:
        name = getattr(user.target, "_opname", "")
        names = ("self", "dim", "start", "end", "step") if name == "slice" else _SPLIT
        given = {**dict(zip(names, user.args, strict=False)), **user.kwargs}
        dim = given.get("dim", 0)
        if not isinstance(dim, int) or dim % rank != rank - 1:
            yield user, None
        elif name == "slice":
            start, stop = given.get("start") or 0, given.get("end")
            stop = width if stop is None else stop
            plain = isinstance(start, int) and isinstance(stop, int) and given.get("step", 1) == 1
            yield user, slice(start, stop).indices(width)[:2] if plain else None
        elif name in ("split", "split_with_sizes", "chunk"):
            yield from _parts(user)
        else:
            yield user, None


def _parts(split: fx.Node) -> Iterator[tuple[fx.Node, Interval | None]]:
    starts = [0]
    for value in tensors_of(split.meta["val"]):
        starts.append(starts[-1] + int(value.shape[-1]))
    for user in split.users:
        if user.target is not operator.getitem:
            yield user, None
            continue
        index = int(user.args[1]) % (len(starts) - 1)  # type: ignore[arg-type]
        yield user, (starts[index], starts[index + 1])


def _split(program: Program, fused: _Fused, pieces: dict[str, list[GraphInput]]) -> None:
    """Edit the graph; notes in `pieces` what takes the place of each parameter."""
    node = fused.product
    weight_at, bias_at, dim = _PRODUCTS[node.target._opname]  # type: ignore[union-attr]
    operands = {weight_at: dim}
    if bias_at is not None and len(node.args) > bias_at and node.args[bias_at] is not None:
        operands[bias_at] = 0
    for start, stop in fused.intervals:
        changes: dict[int, fx.Node] = {}
        for position, piece_dim in operands.items():
            whole = node.args[position]
            assert isinstance(whole, fx.Node)
            changes[position] = piece_of(program, whole, piece_dim, (start, stop), pieces)
        args: list[Any] = [changes.get(i, a) for i, a in enumerate(node.args)]
        value = _made(program, node, node, args, stop - start)
        for reshape in fused.reshapes:
            sizes = [*list(reshape.args[1])[:-1], stop - start]  # type: ignore[arg-type]
            value = _made(program, reshape, reshape, [value, sizes], stop - start)
        for reader, interval in fused.readers:
            if interval == (start, stop):
                reader.replace_all_uses_with(value)


def piece_of(
    program: Program,
    whole: fx.Node,
    dim: int,
    interval: Interval,
    pieces: dict[str, list[GraphInput]],
) -> fx.Node:
    """A placeholder for an interval of the parameter `whole`, noted in `pieces`."""
    start, stop = interval
    item = program.input(whole.name)
    with program.graph.inserting_before(whole):
        made = program.graph.placeholder(f"{whole.name}_{start}")
    made.meta = dict(whole.meta)
    shape = list(whole.meta["val"].shape)
    shape[dim] = stop - start
    made.meta["val"] = _empty(whole.meta["val"], shape)
    target = str(Piece(item.target, dim, start, stop))
    pieces.setdefault(whole.name, []).append(GraphInput(made.name, item.kind, target))
    return made


def _made(program: Program, like: fx.Node, before: fx.Node, args: list[Any], width: int) -> fx.Node:
    target = like.target
    assert callable(target)
    with program.graph.inserting_before(before):
        made = program.graph.call_function(target, tuple(args))
    made.meta = dict(like.meta)
    value = like.meta["val"]
    made.meta["val"] = _empty(value, [*value.shape[:-1], width])
    return made


def _empty(like: torch.Tensor, shape: list[Any]) -> torch.Tensor:
    made = like.new_empty(shape)
    return made.requires_grad_(like.requires_grad) if like.requires_grad else made
