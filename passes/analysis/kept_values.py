"""What autograd keeps of a block, value by value: what recomputing some of its ops can free.

The block's local graph runs on the meta device under autograd, as in `block_memory`. A *value* is
a storage; views of it are the same value. An op is named by the node that makes the storage. Ops
that change a value in place, the op that made it, and all its readers form one *unit*: they run
again together or not at all, as a reader would see another content otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.parts import Slot
from autopar.passes.analysis.aliases import written
from autopar.passes.analysis.batch_statistics import statistic_dims
from autopar.passes.analysis.block_memory import call_on_meta
from autopar.passes.analysis.random_ops import draws
from autopar.passes.analysis.workspace import forward_workspace
from autopar.program import tensors_of


@dataclass(slots=True)
class Value:
    """One storage: its bytes, the unit that makes it (None for an input of the block), the units
    that read it, and whether autograd keeps it."""

    nbytes: int
    maker: int | None
    readers: set[int] = field(default_factory=set)
    saved: bool = False


@dataclass(slots=True)
class Unit:
    """Ops that run again together. `internal`: bytes that autograd keeps of them beside operands
    and results (as the log-sum-exp of attention). `why_not`: why they may not run twice.
    `workspace`: bytes that an op allocates beside its results."""

    nodes: list[fx.Node]
    internal: int = 0
    why_not: str = ""
    workspace: int = 0


@dataclass(frozen=True)
class KeptValues:
    """`units` in the order of the graph. Parameters and values from outside are no values."""

    units: tuple[Unit, ...]
    values: tuple[Value, ...]

    def kept(self, again: Iterable[int]) -> int:
        """Bytes kept from forward to backward when the units `again` run twice."""
        twice = set(again)
        total = sum(u.internal for i, u in enumerate(self.units) if i not in twice)
        for value in self.values:
            if value.maker not in twice and (value.saved or value.readers & twice):
                total += value.nbytes
        return total

    def rebuilt(self, again: Iterable[int]) -> int:
        """Bytes that the units `again` make once more for the backward."""
        twice = set(again)
        internal = sum(self.units[i].internal for i in twice)
        return internal + sum(v.nbytes for v in self.values if v.saved and v.maker in twice)

    def passing(self, again: Iterable[int]) -> int:
        """Bytes, at the fullest moment while the units `again` run, over those that they rebuild:
        what only they read, and workspace."""
        twice = set(again)
        live = most = 0
        for index in sorted(twice):
            unit = self.units[index]
            made = [v for v in self.values if v.maker == index]
            live += unit.internal + sum(v.nbytes for v in made)
            most = max(most, live + unit.workspace)
            # What no unit that runs again reads any more, unless the backward does.
            for value in self.values:
                last = max((r for r in value.readers if r in twice), default=value.maker)
                if value.maker in twice and not value.saved and last == index:
                    live -= value.nbytes
        return max(0, most - self.rebuilt(twice))


class _Run:
    """One forward on meta tensors, storage by storage."""

    def __init__(self, graph: fx.GraphModule, slots: tuple[Slot, ...]) -> None:
        self.graph = graph
        self.values: dict[fx.Node, Any] = {}
        # Storage -> bytes, its maker's node (None for an input), the nodes that read it.
        self.sizes: dict[int, int] = {}
        self.makers: dict[int, fx.Node | None] = {}
        self.readers: dict[int, set[fx.Node]] = {}
        self.outside: set[int] = set()
        self.packed: dict[fx.Node, set[int]] = {}
        self.alive: list[torch.Tensor] = []
        self._place(slots)
        self._forward()

    def _place(self, slots: tuple[Slot, ...]) -> None:
        nodes = self.graph.graph.find_nodes(op="placeholder")
        for node, slot in zip(nodes, slots, strict=True):
            grad = bool(node.meta.get("requires_grad"))
            leaf = torch.empty_like(node.meta["val"]).requires_grad_(grad)
            self.values[node] = leaf
            if slot.kind == "value" and grad:
                self._new(leaf, None)
            else:
                self.outside.add(_key(leaf))
        for node in self.graph.graph.find_nodes(op="get_attr"):
            self.values[node] = torch.empty_like(node.meta["val"])
            self.outside.add(_key(self.values[node]))

    def _new(self, tensor: torch.Tensor, maker: fx.Node | None) -> None:
        key = _key(tensor)
        self.makers[key], self.readers[key] = maker, set()
        self.sizes[key] = tensor.untyped_storage().nbytes()

    def _forward(self) -> None:
        current: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            self.alive.append(tensor)
            self.sizes.setdefault(_key(tensor), tensor.untyped_storage().nbytes())
            current.add(_key(tensor))
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            for node in self.graph.graph.nodes:
                if node.op != "call_function":
                    continue
                current = self.packed[node] = set()
                self.values[node] = call_on_meta(node, self.values)
                self._note(node)

    def _note(self, node: fx.Node) -> None:
        new = [t for t in tensors_of(self.values[node]) if not self._known(t)]
        for tensor in new:
            self._new(tensor, node)
        if new or written(node):
            for source in node.all_input_nodes:
                for tensor in tensors_of(self.values[source]):
                    if _key(tensor) in self.readers:
                        self.readers[_key(tensor)].add(node)

    def _known(self, tensor: torch.Tensor) -> bool:
        return _key(tensor) in self.makers or _key(tensor) in self.outside


def kept_values(graph: fx.GraphModule, slots: tuple[Slot, ...]) -> KeptValues:
    """The units and values of a block's local graph (one rank's)."""
    run = _Run(graph, slots)
    unit_of, units = _units(run)
    values = {
        key: Value(
            run.sizes[key],
            None if maker is None else unit_of[maker],
            {unit_of[reader] for reader in run.readers[key]},
        )
        for key, maker in run.makers.items()
    }
    # In place in its own unit a value is no input.
    for value in values.values():
        value.readers.discard(-1 if value.maker is None else value.maker)
    for node, keys in run.packed.items():
        for key in keys:
            if key in values:
                values[key].saved = True
            elif key not in run.outside:
                # A view keeps nothing of its own: what is unknown belongs to an op.
                units[unit_of[node]].internal += run.sizes[key]
    return KeptValues(tuple(units), tuple(values.values()))


def _units(run: _Run) -> tuple[dict[fx.Node, int], list[Unit]]:
    """Every op that makes or changes memory -> its unit; ops torn apart by nothing are alone."""
    makers = {m for m in run.makers.values() if m is not None}
    ops = [n for n in run.packed if n in makers or written(n) or run.packed[n] - set(run.makers)]
    leader = {node: node for node in ops}

    def find(node: fx.Node) -> fx.Node:
        while leader[node] is not node:
            node = leader[node]
        return node

    given: set[int] = set()
    for node in ops:
        for key in _storages(run, written(node)):
            maker = run.makers.get(key)
            if maker is None:
                given.add(key)
                continue
            for other in (maker, *run.readers[key]):
                leader[find(other)] = find(node)
    why: dict[fx.Node, str] = {}
    for node in ops:
        if draws(node):
            why[node] = "it draws random numbers"
        elif statistic_dims(node) is not None:
            why[node] = "it takes statistics of the batch, which dp ranks may sum"
        elif given & _storages(run, node.all_input_nodes):
            why[node] = "what the block is given changes in place"
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in ops:
        members.setdefault(find(node), []).append(node)
    unit_of: dict[fx.Node, int] = {}
    units: list[Unit] = []
    for nodes in members.values():
        for node in nodes:
            unit_of[node] = len(units)
        reason = next((why[n] for n in nodes if n in why), "")
        space = max(forward_workspace(n) for n in nodes)
        units.append(Unit(nodes, why_not=reason, workspace=space))
    return unit_of, units


def _storages(run: _Run, nodes: Iterable[fx.Node]) -> set[int]:
    return {_key(t) for n in nodes for t in tensors_of(run.values[n])}


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
