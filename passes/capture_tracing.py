"""What a model may ask while it is traced on meta, where tensors have no values.

torch.tensor([1, 2], device=x.device), x[:, [0, 2]]
                                               made on the CPU, so that the numbers are kept
if not torch.isfinite(x).all(): clamp          no: overflow is no part of the program (a note)
embedding_bag                                  a lookup and a reduction (`capture_bags`)
x.data                                         x.detach(), which the graph knows
x.register_hook, torch.autograd.grad           refused at once, where the line is known
nn.Transformer: is this mask causal?           not said: the mask is used as it is given
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopar.passes.capture_bags import bags_of_rows
from autopar.passes.capture_hooks import GradientHook, registers_hook

_FROM_NUMBERS: tuple[Callable[..., Any], ...] = (torch.tensor, torch.as_tensor, torch.asarray)
_INDEXED = (torch.Tensor.__getitem__, torch.Tensor.__setitem__)
# Questions about overflow, and the answer of a run in which there is none.
_OVERFLOW: dict[Callable[..., Any], bool] = {
    torch.isfinite: True, torch.Tensor.isfinite: True,
    torch.isinf: False, torch.Tensor.isinf: False,
    torch.isnan: False, torch.Tensor.isnan: False,
}  # fmt: skip
_JOINS: dict[Callable[..., Any], Callable[[list[bool]], bool]] = {
    torch.Tensor.all: all, torch.all: all, torch.Tensor.any: any, torch.any: any,
    torch.Tensor.__or__: any, torch.logical_or: any, torch.Tensor.logical_or: any,
    torch.Tensor.__and__: all, torch.logical_and: all, torch.Tensor.logical_and: all,
    torch.logical_not: lambda v: not v[0], torch.Tensor.logical_not: lambda v: not v[0],
    torch.Tensor.__invert__: lambda v: not v[0],
}  # fmt: skip


_DATA: Callable[..., Any] = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_BACKWARDS: tuple[Callable[..., Any], ...] = (
    torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward,
)  # fmt: skip


class InnerBackward(RuntimeError):
    """A forward that computes gradients, or transforms functions, itself."""


class Tracing(TorchFunctionMode):
    """Active while torch.export runs; `notes` says what was assumed."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: dict[str, None] = {}
        # By identity; the tensors are kept so that no other takes their place.
        self._answers: dict[int, tuple[torch.Tensor, bool]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if registers_hook(func):
            raise GradientHook(f"Tensor.{func.__name__} is called in the forward")
        if func in _BACKWARDS and not _by_capture():
            raise InnerBackward(f"{func.__module__}.{func.__qualname__} is called in the forward")
        if func == _DATA:
            return args[0].detach()
        if func is torch.nn.functional.embedding_bag:
            bags = bags_of_rows(*args, **kwargs)
            return func(*args, **kwargs) if bags is None else bags
        if func in _FROM_NUMBERS:
            return _from_numbers(func, args, kwargs)
        if func in _INDEXED and args[0].is_meta:
            args = (args[0], _index(args[1]), *args[2:])
        if func is torch.Tensor.__bool__ and id(args[0]) in self._answers:
            self.notes[f"values are taken to be finite at {_caller()}"] = None
            return self._answers[id(args[0])][1]
        result = func(*args, **kwargs)
        answer = self._answer(func, args)
        if answer is not None:
            self._answers[id(result)] = result, answer
        return result

    def _answer(self, func: Callable[..., Any], args: tuple[Any, ...]) -> bool | None:
        if func in _OVERFLOW:
            return _OVERFLOW[func]
        join = _JOINS.get(func)
        known = [self._answers.get(id(a)) for a in args if isinstance(a, torch.Tensor)]
        if join is None or not known or None in known:
            return None
        return join([k[1] for k in known if k is not None])


def _from_numbers(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    """Made on meta, as the twin's inputs ask for, torch.export would lift an empty constant."""
    data = args[0] if args else kwargs.get("data")
    result: torch.Tensor
    if torch.device(kwargs.get("device") or "cpu").type == "meta" and not _holds_tensor(data):
        result = func(*args, **{**kwargs, "device": "cpu"}).to("meta")
    else:
        result = func(*args, **kwargs)
    return result


def _index(index: Any) -> Any:
    """Lists of numbers among the indices as tensors."""
    if isinstance(index, tuple):
        return tuple(_index(i) for i in index)
    if isinstance(index, list) and index and all(isinstance(i, int) for i in index):
        return _from_numbers(torch.tensor, (index,), {"device": "meta"})
    return index


def _holds_tensor(data: Any) -> bool:
    if isinstance(data, list | tuple):
        return any(_holds_tensor(d) for d in data)
    return isinstance(data, torch.Tensor | torch.SymInt | torch.SymFloat)


def _by_capture() -> bool:
    """Whether capture itself asks: it looks into the backward of an autograd.Function."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return frame.f_code.co_filename.startswith(_OWN_FOLDER)


_OWN_FOLDER = str(Path(__file__).parent)


def _caller() -> str:
    """`file:line` of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and file != __file__:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


@contextmanager
def masks_as_given() -> Iterator[None]:
    """nn.Transformer compares values to find causal masks; without the hint it uses the mask."""
    module: Any = nn.modules.transformer
    before = module._detect_is_causal_mask
    module._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        module._detect_is_causal_mask = before


@contextmanager
def no_function_transforms() -> Iterator[None]:
    """While active, torch.vmap, torch.func.grad and their like raise `InnerBackward`: the graph
    would hold tensors of a level that is left again."""
    replaced = []

    def refused(name: str) -> Callable[..., Any]:
        def nesting(*args: Any, **kwargs: Any) -> Any:
            raise InnerBackward(f"torch.func's {name} is used in the forward")

        return nesting

    for module, name, said in (level for level in _LEVELS if hasattr(level[0], level[1])):
        replaced.append((module, name, getattr(module, name)))
        setattr(module, name, refused(said))
    try:
        yield
    finally:
        for module, name, function in replaced:
            setattr(module, name, function)


_LEVELS: tuple[tuple[Any, str, str], ...] = (
    (torch._functorch.vmap, "vmap_increment_nesting", "vmap"),
    (torch._functorch.eager_transforms, "grad_increment_nesting", "grad, vjp or jacrev"),
    (torch._functorch.eager_transforms, "jvp_increment_nesting", "jvp or jacfwd"),
)
