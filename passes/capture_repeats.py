"""Trace a layer that is repeated two or three times, and add its nodes for the other times.

The first two calls of alike layers are traced in full and compared; a later call is replayed when
nothing that the traced code could see is different: arguments but for tensor values, the attributes
that it read, the globals and closures that its code names, torch's switches. The last layer of a
kind is traced in full again, and must agree. Any other call is traced as if this file did not
exist.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils import _pytree as pytree
from torch.utils._traceback import CapturedTraceback

from autopar.passes.capture_layer import Layer, global_hooks, is_plain, structure
from autopar.passes.capture_reads import Reads
from autopar.passes.capture_segment import (
    Before,
    NewTensor,
    NotRepeatable,
    Segment,
    Site,
    describe,
    is_symbolic,
    narrowed,
    node_of,
    record,
    replay,
)
from autopar.passes.capture_state import (
    CodeState,
    Digest,
    Digester,
    Same,
    ambient,
    reachable_code,
)

_MIN_REPEATS = 4
_MAX_TRACES = 6  # recordings of a family that never lead to a replay


class Disagreement(Exception):
    """A layer that was traced to be sure differs from those that stood for it."""


@dataclass
class Group:
    """Calls that could not be told apart so far: what they read, and what it was."""

    reads: set[tuple[str, str]]
    state: Digest
    segment: Segment
    proven: bool = False


@dataclass
class Family:
    """Calls with arguments of one kind to modules of one structure."""

    groups: list[Group] = field(default_factory=list)
    traces: int = 0
    refused: str = ""


@dataclass(frozen=True)
class Call:
    layer: Layer
    site: Site
    spec: Any
    digester: Digester
    key: Digest


class Repeats:
    """Active while torch.export runs on `twin`.

    `replayed`: how many calls were not traced. `refusals`: why others were. `escaped`: whether the
    graph may be wrong: a value from inside of a call that stood for others was used elsewhere, or a
    check failed.
    """

    def __init__(self, twin: nn.Module) -> None:
        self.replayed = 0
        self.escaped = False
        self.refusals: Counter[str] = Counter()
        self._reads = Reads()
        self._families: dict[Digest, Family] = {}
        self._code: dict[Digest, CodeState] = {}
        self._layers: dict[int, tuple[Layer, int]] = {}
        self._last: set[int] = set()
        self._in_full = 0
        self._used: dict[int, Segment] = {}
        self._twin = twin
        self._find(twin)

    def _find(self, twin: nn.Module) -> None:
        kinds: dict[Digest, list[nn.Module]] = {}
        for module in twin.modules():
            if module is not twin and module._modules and all(map(is_plain, module.modules())):
                kinds.setdefault(structure(module), []).append(module)
        for number, modules in enumerate(kinds.values()):
            if len(modules) >= _MIN_REPEATS:
                for module in modules:
                    self._layers[id(module.__dict__)] = Layer(module), number
                self._last.add(id(modules[-1].__dict__))

    @contextmanager
    def active(self) -> Iterator[None]:
        root: Any = nn.Module
        plain = root._call_impl
        free = "__getattribute__" not in nn.Module.__dict__ and not global_hooks()
        if not self._layers or not free:
            yield
            return

        def _call_impl(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            known = self._layers.get(id(module.__dict__))
            if known is None:
                result = plain(module, *args, **kwargs)
                if module.__dict__ is self._twin.__dict__:
                    self.escaped |= self._escape(result)
                return result
            return self._called(known, lambda: plain(module, *args, **kwargs), (args, kwargs))

        root._call_impl = _call_impl
        try:
            yield
        finally:
            root._call_impl = plain

    def _called(self, known: tuple[Layer, int], forward: Callable[[], Any], given: Any) -> Any:
        layer, number = known
        try:
            call = self._call(layer, number, given)
            family = self._families.setdefault(call.key, Family())
            if family.refused:
                raise NotRepeatable(family.refused)
            group = self._group(family, call)
        except Exception as reason:  # looking at a user's objects may run a user's code
            self.refusals[str(reason)] += 1
            return forward()
        sure = id(layer.module.__dict__) in self._last
        if group is not None and group.proven and not sure and not self._in_full:
            try:
                result = replay(group.segment, call.site)
            except NotRepeatable as reason:
                self.refusals[str(reason)] += 1
                return forward()
            except Exception as error:
                self.escaped = True  # should the model catch the error
                raise Disagreement("a replay stopped half way") from error
            for place, name in group.reads:
                self._reads.note(layer.modules["" if place == "." else place], name)
            self.replayed += 1
            self._used[id(group.segment)] = group.segment
            return result
        return self._traced(call, family, group, forward, given)

    def _call(self, layer: Layer, number: int, given: Any) -> Call:
        mode = get_proxy_mode()
        if mode is None or layer.hooked():
            raise NotRepeatable("hooks" if mode else "nothing is traced")
        tracer: Any = mode.tracer
        leaves, spec = pytree.tree_flatten(given)
        own = layer.own()
        stack = dict(tracer.module_stack)
        site = Site(tracer, leaves, own, stack, _callers(tracer))
        places = {**layer.places, **{id(t): name for name, t in reversed(own.items())}}
        # The tracer numbers repeated calls, and the paths of nodes say so.
        path = site.path
        calls = tuple(
            tracer.num_calls.get(f"{path}.{place}" if place else path, 0) for place in layer.modules
        )
        digester = Digester(places)
        key = (
            number, ambient(), spec, calls, _arguments(site, digester), _memory(site),
            [*stack.values()][-1][1],
        )  # fmt: skip
        return Call(layer, site, spec, digester, key)

    def _group(self, family: Family, call: Call) -> Group | None:
        for group in family.groups:
            if self._state(call, group.reads) == group.state:
                return group
        return None

    def _state(self, call: Call, reads: set[tuple[str, str]]) -> Digest:
        """What the attributes of `reads` are, and all that the code of the layer names."""
        digester = Digester(call.digester.places)
        read = tuple(call.layer.attribute(*r, digester) for r in sorted(reads))
        return read, self._code_state(call.layer).digest(digester)

    def _code_state(self, layer: Layer) -> CodeState:
        key = tuple(Same(c) for c in reachable_code(layer.modules.values()))
        if key not in self._code:
            self._code[key] = CodeState(layer.modules.values())
        return self._code[key]

    def _everything(self, call: Call) -> Digest:
        """All that the call could write to: attributes, arguments, globals, Python's dice."""
        digester = Digester(call.digester.places)
        parts = tuple(digester.attributes(m) for m in call.layer.modules.values())
        code = self._code_state(call.layer).digest(digester)
        return parts, code, random.getstate(), ambient()

    def _traced(
        self,
        call: Call,
        family: Family,
        group: Group | None,
        forward: Callable[[], Any],
        given: Any,
    ) -> Any:
        """Run the call, and learn from it; or, of a last layer, check it."""
        sure = group is not None and group.proven
        try:
            held = Digester(call.digester.places)(given)
            before, state = Before.of(call.site), self._everything(call)
        except Exception as reason:
            family.refused = str(reason)
            self.refusals[str(reason)] += 1
            return forward()
        self._in_full += sure
        try:
            with self._reads.recording(call.layer.places) as reads:
                result = forward()
        finally:
            self._in_full -= sure
        try:
            if state != self._everything(call):
                raise NotRepeatable("it changes attributes or globals")
            leaves, spec = pytree.tree_flatten(given)
            same = len(leaves) == len(call.site.leaves)
            same = same and all(map(lambda a, b: a is b, leaves, call.site.leaves))
            if not same or spec != call.spec or Digester(call.digester.places)(given) != held:
                raise NotRepeatable("it changes its arguments")
            self._learn(call, family, group, record(call.site, before, result), reads)
        except Exception as reason:
            if sure:
                self.escaped = True
                raise Disagreement(str(reason)) from reason
            family.refused = str(reason)
            self.refusals[str(reason)] += 1
        return result

    def _learn(
        self,
        call: Call,
        family: Family,
        group: Group | None,
        segment: Segment,
        reads: set[tuple[str, str]],
    ) -> None:
        family.traces += 1
        if group is None:
            if family.traces > _MAX_TRACES and not any(g.proven for g in family.groups):
                raise NotRepeatable("no two of them are alike")
            family.groups.append(Group(reads, self._state(call, reads), segment))
            return
        try:
            proven = narrowed(group.segment, segment)
        except NotRepeatable:
            if group.proven or family.traces > _MAX_TRACES:
                raise
            # The first of a row may be special: its input has a second name.
            group.segment = segment
            return
        if not group.proven:
            group.segment, group.proven = proven, True
            group.reads |= reads
            group.state = self._state(call, group.reads)

    def _escape(self, result: Any) -> bool:
        """Asked when the trace is complete: later passes add readers of their own."""
        mode = get_proxy_mode()
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        ends = {node_of(mode.tracer, t) for t in tensors} if mode else set()
        for segment in self._used.values():
            inside = set(segment.nodes)
            inner = inside - {o.node for o in segment.outputs if isinstance(o, NewTensor)}
            inner -= set(segment.moved.values())
            if inner & ends or any(_leaves(node, inside) for node in inner):
                return True
        return False


def _leaves(node: fx.Node, inside: set[fx.Node]) -> bool:
    # A size may be read off any tensor that has it; it is the same number.
    readers = (user for user in node.users if user not in inside)
    return not is_symbolic(node) and not all(map(is_symbolic, readers))


def _callers(tracer: Any) -> str:
    """The part of a stack trace that all nodes of a call have in common, as the tracer puts it."""
    if not tracer.record_stack_traces:
        return ""
    captured: Any = CapturedTraceback
    frames = tracer._filter_traceback_frames(captured.extract().summary())
    return "".join(frames.format()).strip()


def _arguments(site: Site, digester: Digester) -> Digest:
    """Of tensors what Python can see of them, of all else what it is."""
    return tuple(_tensor(v) if isinstance(v, torch.Tensor) else digester(v) for v in site.leaves)


def _tensor(value: torch.Tensor) -> Digest:
    autograd = value.requires_grad, value.is_leaf, value._is_view()
    return describe(value), *autograd


def _memory(site: Site) -> Digest:
    """Which tensors are the same, and which share memory."""
    things: dict[int, int] = {}
    memory: dict[int, int] = {}
    return tuple(
        (
            role[0],
            things.setdefault(id(t), len(things)),
            memory.setdefault(t.untyped_storage()._cdata, len(memory)),
        )
        for role, t in site.tensors()
    )
