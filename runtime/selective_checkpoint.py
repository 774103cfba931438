"""Keeps a part of a block for its backward, and runs the rest again there.

While the block's forward runs, each tensor that autograd saves is looked at. What one of the
planned ops made, or made for itself, is not kept: the backward finds a note in its place. The first
note that is read runs the planned ops again, all of them, and nothing else: not the block, as
`torch.utils.checkpoint` would, and under no autograd but where autograd's own numbers of an op (as
the statistics of a norm) are wanted. What is saved and was not planned is kept, so a plan can cost
memory at most, never a number.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map

from autopar.errors import UsageError
from autopar.stage_program import Rerun

Tensor = torch.Tensor
# What a note stands for: result `place` of op `op`, or the `place`-th tensor that autograd saved
# while that op ran.
Source = tuple[str, int, int]
RESULT, INTERNAL = "result", "internal"


class SelectiveCheckpoint:
    """The graph of a block with the ops of `rerun` run again in the backward, once.

    `read()` gives the tensors of the first placeholders (parameters and buffers), anew for the
    backward, as ZeRO may have moved them; the last placeholders are the block's inputs.
    """

    def __init__(
        self, graph: fx.GraphModule, rerun: Rerun, read: Callable[[], Sequence[Tensor]]
    ) -> None:
        nodes = {node.name: node for node in graph.graph.nodes}
        self._targets = [nodes[name].target for name in rerun.ops]
        self._results = len(graph.graph.output_node().args[0])  # type: ignore[arg-type]
        self._forward = _forward_graph(graph, rerun).forward
        self._again = _again_graph(graph, rerun).forward
        self._read = read

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        step = _Step(self._targets, partial(self._run_again, [x.detach() for x in inputs]))
        with step, torch.autograd.graph.saved_tensors_hooks(step.pack, step.unpack):
            found = self._forward(*self._read(), *inputs)
        step.end_forward([value.detach() for value in found[self._results :]])
        return tuple(found[: self._results])

    def _run_again(self, inputs: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        with torch.no_grad():
            self._again(*self._read(), *inputs, *sources)


@dataclass(slots=True)
class _Note:
    """In place of a saved tensor: the tensor itself with its version; or, until it is made again,
    where it comes from and which part of that storage it was."""

    tensor: Tensor | None
    version: int = 0
    source: Source | None = None
    geometry: tuple[torch.dtype, torch.Size, tuple[int, ...], int, int] | None = None


class _Step:
    """One micro-batch through one block, from its forward to its backward."""

    def __init__(self, targets: list[Any], again: Callable[[Sequence[Tensor]], None]) -> None:
        self.targets = targets
        self.sources: list[Tensor] | None = None
        self._again: Callable[[Sequence[Tensor]], None] | None = again
        self._made: dict[int, tuple[int, int]] = {}  # storage -> op and place, while it lives
        self._alive: list[weakref.ref[Any]] = []
        self._packed: list[_Note] = []  # by the op that runs
        self._grads: dict[int, list[bool]] = {}  # of ops with internal tensors: operands' gradients
        self._notes: dict[Source, list[_Note]] = {}  # whose tensors are to be made again
        self._before: _Step | None = None

    def __enter__(self) -> None:
        self._before, _running.step = getattr(_running, "step", None), self

    def __exit__(self, *error: object) -> None:
        _running.step, self._before = self._before, None

    # Forward.

    def pack(self, tensor: Tensor) -> _Note:
        note = _Note(tensor.detach(), tensor._version)
        made = self._made.get(_storage(tensor))
        if made is not None:
            self._replace(note, (RESULT, *made))
        self._packed.append(note)
        return note

    def run(self, op: int, args: Any, kwargs: Any) -> Any:
        """An op that will run again."""
        packed = self._packed = []
        result = self.targets[op](*args, **kwargs)
        # A list that lives longer would keep what autograd has let go of.
        self._packed = []
        operands = {_storage(t) for t in _tensors((args, kwargs))}
        for place, tensor in enumerate(_tensors(result)):
            if _storage(tensor) not in operands or _storage(tensor) in self._made:
                self._add(tensor, (op, place))
        for place, note in enumerate(packed):
            if note.tensor is None or (key := _storage(note.tensor)) in operands:
                continue
            if key in self._made:
                self._replace(note, (RESULT, *self._made[key]))
            elif not _changes(self.targets[op]):
                self._replace(note, (INTERNAL, op, place))
                self._grads[op] = [t.requires_grad for t in _tensors((args, kwargs))]
        return result

    def end_forward(self, sources: list[Tensor]) -> None:
        self.sources = sources
        self._packed = []

    def _add(self, tensor: Tensor, made: tuple[int, int]) -> None:
        key = _storage(tensor)
        if key not in self._made:
            # An address is used again when its storage is gone.
            gone = partial(_forget, weakref.ref(self), key)
            self._alive.append(weakref.ref(tensor.untyped_storage(), gone))
        self._made[key] = made

    def forget(self, key: int) -> None:
        self._made.pop(key, None)

    def _replace(self, note: _Note, source: Source) -> None:
        tensor = note.tensor
        assert tensor is not None
        if tensor.is_conj() or tensor.is_neg():
            return  # their geometry does not tell their numbers
        size = tensor.untyped_storage().nbytes()
        where = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()), size
        note.tensor, note.source, note.geometry = None, source, where
        self._notes.setdefault(source, []).append(note)

    # Backward.

    def unpack(self, note: _Note) -> Tensor:
        if note.tensor is None:
            self._rebuild()
        assert note.tensor is not None
        if note.source is None and note.tensor._version != note.version:
            raise UsageError(
                "a tensor that the backward of a block needs was changed in place",
                next_step="don't change parameters or inputs between forward and backward",
            )
        return note.tensor

    def _rebuild(self) -> None:
        again, sources = self._again, self.sources
        assert again is not None and sources is not None
        self._again = self.sources = None
        with self:
            again(sources)
        # From here on each lives as long as autograd holds its note.
        self._notes.clear()

    def _made_again(self, source: Source, tensor: Tensor) -> None:
        for note in self._notes.get(source, ()):
            note.tensor = _part(tensor, note)

    def run_again(self, op: int, args: Any, kwargs: Any) -> Any:
        if op not in self._grads:
            result = self.targets[op](*args, **kwargs)
        else:
            result = self._run_saving(op, args, kwargs)
        for place, tensor in enumerate(_tensors(result)):
            self._made_again((RESULT, op, place), tensor)
        return result

    def _run_saving(self, op: int, args: Any, kwargs: Any) -> Any:
        """Under autograd, for what it saves of the op."""
        grads = iter(self._grads[op])
        place = 0

        def leaf(value: Any) -> Any:
            return value.detach().requires_grad_(next(grads)) if _is(value) else value

        def pack(tensor: Tensor) -> None:
            nonlocal place
            self._made_again((INTERNAL, op, place), tensor.detach())
            place += 1

        args, kwargs = tree_map(leaf, (args, kwargs))
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, _unread):
            result = self.targets[op](*args, **kwargs)
        return tree_map(lambda v: v.detach() if _is(v) else v, result)


def _forget(step: weakref.ref[_Step], key: int, _reference: object) -> None:
    found = step()
    if found is not None:
        found.forget(key)


def _part(base: Tensor, note: _Note) -> Tensor:
    """The tensor that a note stands for, of its storage made again."""
    assert note.geometry is not None
    dtype, size, stride, offset, nbytes = note.geometry
    now = base.untyped_storage().nbytes()
    if now != nbytes:
        raise UsageError(
            f"an op gave {now} bytes when it ran again, {nbytes} before",
            next_step="plan with recompute=none, and report the model",
        )
    if base.dtype == dtype:
        return base.as_strided(size, stride, offset)
    empty = torch.empty(0, dtype=dtype, device=base.device)
    return empty.set_(base.untyped_storage(), offset, size, stride)


# The ops that run again stand in the two graphs as calls of these functions.

_running = threading.local()


def run_noted(op: int, *args: Any, **kwargs: Any) -> Any:
    """In the forward."""
    return _running.step.run(op, args, kwargs)


def run_again(op: int, *args: Any, **kwargs: Any) -> Any:
    """In the backward."""
    return _running.step.run_again(op, args, kwargs)


def _forward_graph(graph: fx.GraphModule, rerun: Rerun) -> fx.GraphModule:
    """The block, which also returns what the ops will read when they run again."""
    made = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    numbers = {name: index for index, name in enumerate(rerun.ops)}
    by_name: dict[str, fx.Node] = {}
    for node in graph.graph.nodes:
        if node.op == "output":
            extra = tuple(by_name[name] for name in rerun.sources)
            results = fx.map_arg(node.args[0], values.__getitem__)
            made.output((*results, *extra))
        else:
            values[node] = by_name[node.name] = _copied(made, node, values, numbers, run_noted)
    return fx.GraphModule(graph, made)


def _again_graph(graph: fx.GraphModule, rerun: Rerun) -> fx.GraphModule:
    """The ops to run again, of parameters, buffers, inputs and sources."""
    made = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    numbers = {name: index for index, name in enumerate(rerun.ops)}
    nodes = {node.name: node for node in graph.graph.nodes}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            values[node] = made.node_copy(node, values.__getitem__)
    for name in rerun.sources:
        values[nodes[name]] = made.placeholder(f"source_{name}")
    chosen = {*rerun.ops, *rerun.views}
    for node in graph.graph.nodes:
        if node.name in chosen:
            values[node] = _copied(made, node, values, numbers, run_again)
    made.output(())
    return fx.GraphModule(graph, made)


def _copied(
    made: fx.Graph,
    node: fx.Node,
    values: dict[fx.Node, fx.Node],
    numbers: dict[str, int],
    run: Callable[..., Any],
) -> fx.Node:
    if node.name not in numbers:
        return made.node_copy(node, values.__getitem__)
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return made.create_node("call_function", run, (numbers[node.name], *args), kwargs, node.name)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if _is(leaf)]


def _is(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _changes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


def _unread(_packed: None) -> Tensor:
    raise AssertionError("nothing reads the graph of an op that ran again")
