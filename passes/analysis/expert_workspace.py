"""Bytes that the experts of a layer allocate for a moment, forward and backward.

The op is many kernels in one node of the graph, and what it holds between them is more than its
result. So its own code is run on tensors that have shapes alone, and what is alive is counted;
rows are taken to be routed evenly.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar.cost.experts import assumed_imbalance
from autopar.experts import EXCHANGED
from autopar.experts.assumed_rows import imbalance
from autopar.experts.exchange import exchanged
from autopar.experts.operands import TENSORS, Operands
from autopar.op_call import STATIC, op_call

_cache: dict[Any, tuple[int, int]] = {}


class _Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of the storages that ops have made and that something still holds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[int, tuple[Any, int]] = {}
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._add((args, kwargs), made=False)
        result = func(*args, **(kwargs or {}))
        self._add(result, made=True)
        self.most = max(self.most, self.now)
        return result

    def _add(self, values: Any, *, made: bool) -> None:
        for tensor in tree_leaves(values):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._sizes:
                size = storage.nbytes() if made else 0
                self._sizes[key] = weakref.ref(storage, partial(self._remove, key)), size
                self.now += size

    def _remove(self, key: int, _reference: object) -> None:
        self.now -= self._sizes.pop(key)[1]


def experts_workspace(node: fx.Node) -> tuple[int, int]:
    """Bytes beside the result and what is kept for the backward; and beside the gradients and
    what was kept, while the backward runs."""
    values = [a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args]
    wanted = [isinstance(a, fx.Node) and bool(a.meta.get("requires_grad")) for a in node.args]
    shapes = [(tuple(v.shape), v.dtype) if isinstance(v, torch.Tensor) else v for v in values]
    factor = assumed_imbalance(op_call(node, STATIC))
    key = (str(node.target), tuple(shapes), tuple(wanted), factor)
    if key not in _cache:
        with imbalance(factor):
            _cache[key] = _run(str(getattr(node.target, "_opname", "")), values, wanted)
    return _cache[key]


def _run(name: str, values: list[Any], wanted: list[bool]) -> tuple[int, int]:
    with FakeTensorMode(), torch.enable_grad():
        tensors = [
            torch.empty(v.shape, dtype=v.dtype, device="cpu", requires_grad=w)
            if isinstance(v, torch.Tensor)
            else None
            for v, w in zip(values[:TENSORS], wanted, strict=False)
        ]
        given, rest = Operands(*tensors), values[TENSORS:]  # type: ignore[arg-type]
        with _Alive() as alive:
            if name == EXCHANGED:
                experts, transposed, text, ranks, _ = rest
                result = exchanged(given, experts, transposed, text, ranks, None)
            else:
                experts, *last = rest
                transposed, text = last[-2:] if name == "experts" else last[:2]
                result = torch.ops.autopar.experts(*tensors, experts, 0, 1, transposed, text)
            forward = alive.most - alive.now
            if not result.requires_grad:
                return forward, 0
            grad = torch.empty_like(result)
            alive.most = before = alive.now
            leaves = [t for t in tensors if t is not None and t.requires_grad]
            found = torch.autograd.grad(result, leaves, grad, allow_unused=True)
            made = sum(g.untyped_storage().nbytes() for g in found if g is not None)
            return forward, max(0, alive.most - before - made)
