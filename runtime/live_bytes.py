"""Measures what a rank holds: the bytes of all storages that are alive, and what they are for.

    with LiveBytes(program, optimizer) as live:
        program.step(batch); optimizer.step(); optimizer.zero_grad()   # fills states and buffers
        live.start()
        program.step(batch); optimizer.step(); optimizer.zero_grad()
    live.peak()

The kernels of this package are looked into, those of torch are not: what one of torch's kernels
allocates and frees again is not seen. A step that is measured takes several times as long.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.runtime.pipeline import PipelinedStages
from autopar.runtime.program import DistributedProgram
from autopar.runtime.torch_compat import fsdp_groups, kept_gradients, run_kernel

Tensor = torch.Tensor
# A moment counts as fuller than another when it is by more than this.
RESOLUTION = 5e-4
# Moments whose bytes are within so much of the fullest one's are as good as it; at most so many of
# them are known.
TIE, MOST_TIED = 0.01, 500
TERMS = ("parameters", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class Peak:
    """The fullest moment: bytes of each term of `autopar.cost.memory`, and what ran. `tied`: the
    terms of moments within `TIE` of it, its own among them."""

    terms: dict[str, int]
    moment: str
    tied: tuple[dict[str, int], ...] = ()

    def nearest(self, predicted: Mapping[str, int]) -> dict[str, int]:
        """The terms of the tied moment that differs the least from what was predicted."""

        def off(terms: dict[str, int]) -> int:
            return sum(abs(predicted[term] - terms[term]) for term in TERMS)

        return min((self.terms, *self.tied), key=off)

    @property
    def total(self) -> int:
        return sum(self.terms.values())


def _parts(value: Any) -> Iterator[Tensor]:
    """The tensors that hold the bytes of one, none of what is no tensor: shells (a DTensor, a
    collective's result in flight, quantised values) are made of others."""
    made_of = getattr(value, "__tensor_flatten__", None)
    if made_of is not None:
        for name in made_of()[0]:
            yield from _parts(getattr(value, name))
    elif isinstance(value, Tensor):
        yield value


@dataclass(eq=False)
class _Storage:
    reference: weakref.ref[Any]
    size: int
    term: str


_Snapshot = list[tuple[_Storage, int]]


def _bytes(entry: _Storage) -> int:
    storage = entry.reference()
    return storage.nbytes() if storage is not None else 0


def _terms(then: _Snapshot) -> dict[str, int]:
    terms = dict.fromkeys(TERMS, 0)
    for storage, size in then:
        terms[storage.term] += size
    return terms


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the storage behind the results of each op, until nothing holds it any more.

    A storage's term is that of where it was allocated; what a block leaves when it is done are
    activations, and what has become a gradient or an optimizer's state is found where they are
    kept. All else is a buffer.
    """

    def __init__(self, program: DistributedProgram, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._program = program
        self._optimizer = optimizer
        self._alive: dict[int, _Storage] = {}
        # Bytes of `_alive` but for what FSDP resizes in place, which is looked at each time.
        self._fixed = 0
        self._resized: dict[int, _Storage] = {}
        self._term = "buffers"
        self._gathering = False
        self._moment = ""
        self._counts = {"forward": 0, "backward": 0}
        self._wrapped: list[tuple[Any, str]] = []
        self.start()

    def start(self) -> None:
        """Forget the fullest moment so far."""
        self._most = 0
        self._then: _Snapshot = []
        self._when = ""
        self._last = 0
        self._near: list[tuple[int, _Snapshot]] = []

    def peak(self) -> Peak:
        """The fullest moment since `start`."""
        tied = [then for most, then in self._near if most >= self._most * (1 - TIE)]
        return Peak(_terms(self._then), self._when, tuple(map(_terms, tied)))

    # Which storages there are.

    def _add(self, tensors: Iterable[Any], term: str) -> None:
        for tensor in (part for shell in tensors for part in _parts(shell)):
            if tensor.device.type == "meta":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key in self._alive:
                continue
            gone = weakref.ref(storage, partial(self._remove, key))
            self._alive[key] = entry = _Storage(gone, storage.nbytes(), term)
            if self._gathering:
                self._resized[key] = entry
            else:
                self._fixed += entry.size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "autopar":
            with self:
                result = run_kernel(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        self._add(tree_leaves(result), self._term)
        self._look()
        return result

    def _look(self) -> None:
        """See how full it is now."""
        now = self._fixed + sum(_bytes(entry) for entry in list(self._resized.values()))
        if now > self._last and now >= self._most * (1 - TIE):
            then = [(entry, _bytes(entry)) for entry in list(self._alive.values())]
            if now > self._most * (1 + RESOLUTION):
                self._most, self._when, self._then = now, self._moment, then
                self._near = [near for near in self._near if near[0] >= now * (1 - TIE)]
            if len(self._near) < MOST_TIED:
                self._near.append((now, then))
        self._last = now

    def _remove(self, key: int, _reference: object) -> None:
        entry = self._alive.pop(key)
        if self._resized.pop(key, None) is None:
            self._fixed -= entry.size

    # What they are for.

    def __enter__(self) -> LiveBytes:
        if not self._wrapped:
            self._watch()
            self._add(self._program.parameters(), "parameters")
            self._add((b for _, b in self._program.named_buffers()), "buffers")
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _watch(self) -> None:
        for engine in self._program._engines:
            stage = engine.stage
            self._wrap(engine, "begin_step", self._in_term("parameters"))
            self._wrap(engine, "before_backward", self._at_backward)
            self._wrap(engine, "end_step", self._in_moment("end of the step"))
            self._wrap(stage, "forward", self._at_forward)
            for block in stage.blocks:
                self._wrap(block, "_run", self._in_block)
            for group in fsdp_groups(stage):
                self._wrap(group, "unshard", self._in_gather)
                self._wrap(group, "wait_for_unshard", self._in_gather)
        pipeline = self._program._stage
        if isinstance(pipeline, PipelinedStages):
            for part in pipeline.stages:
                self._wrap(part, "get_fwd_recv_ops", self._in_term("activations"))
        self._wrap(self._optimizer, "step", self._at_optimizer)

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        setattr(owner, name, partial(around, getattr(owner, name)))
        self._wrapped.append((owner, name))

    def close(self) -> None:
        """Leave the program and the optimizer as they were."""
        for owner, name in self._wrapped:
            delattr(owner, name)
        self._wrapped = []

    def _in_term(self, term: str) -> Callable[..., Any]:
        def around(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before, self._term = self._term, term
            try:
                return function(*args, **kwargs)
            finally:
                self._term = before

        return around

    def _in_gather(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before, self._gathering = self._gathering, True
        try:
            return self._in_term("parameters")(function, *args, **kwargs)
        finally:
            self._gathering = before

    def _in_block(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = set(map(id, list(self._alive.values())))
        try:
            return function(*args, **kwargs)
        finally:
            for storage in list(self._alive.values()):
                if id(storage) not in before and storage.term == "buffers":
                    storage.term = "activations"

    def _in_moment(self, moment: str) -> Callable[..., Any]:
        def around(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._moment = moment
            return function(*args, **kwargs)

        return around

    def _at_forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._next("forward")
        return function(*args, **kwargs)

    def _at_backward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._find_gradients()
        self._next("backward")
        return function(*args, **kwargs)

    def _next(self, kind: str) -> None:
        self._counts[kind] += 1
        plan = self._program.plan
        number = (self._counts[kind] - 1) % (plan.microbatches * plan.chunks) + 1
        self._moment = f"{kind} {number}"

    def _at_optimizer(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._find_gradients()
        self._moment = "optimizer"
        result = function(*args, **kwargs)
        self._mark(tree_leaves(dict(self._optimizer.state)), "optimizer")
        return result

    def _find_gradients(self) -> None:
        """Those that are kept from one micro-batch to the next, or to the end of the step."""
        found = [p.grad for p in self._program.parameters()]
        for engine in self._program._engines:
            for group in fsdp_groups(engine.stage):
                found += kept_gradients(group)
        self._mark(found, "gradients")

    def _mark(self, tensors: Iterable[Any], term: str) -> None:
        for tensor in tensors:
            for part in _parts(tensor):
                storage = self._alive.get(part.untyped_storage()._cdata)
                if storage is not None:
                    storage.term = term
