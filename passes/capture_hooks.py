"""Hooks on gradients and on saved tensors: torch.export drops them, so they are refused.

Hooks on a module's forward are part of the graph; these are not:

Module.register_full_backward_hook, parameter.register_hook     seen on the model
Tensor.register_hook in a forward, saved_tensors_hooks          seen while it is traced
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.errors import CaptureError

# Attribute that holds the hooks -> what registers them.
_OF_MODULE = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
_OF_TENSOR = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
REMEDY = (
    "remove the hook; scale or clip gradients between program.step() and optimizer.step(), "
    "or let a torch.autograd.Function in the forward do what the hook does"
)


class GradientHook(RuntimeError):
    """A hook that a forward registers."""


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise `CaptureError` for hooks that wait for a gradient of the model or its parameters."""
    for kind, name in _OF_MODULE.items():
        held = getattr(nn.modules.module, f"_global{kind}", None)
        if held:
            raise _refused("all modules", name, held)
    for path, module in model.named_modules():
        for kind, name in _OF_MODULE.items():
            if held := getattr(module, kind, None):
                raise _refused(f"module {path or '(root)'!r}", name, held)
    for path, parameter in model.named_parameters():
        for kind, name in _OF_TENSOR.items():
            if held := getattr(parameter, kind, None):
                raise _refused(f"parameter {path!r}", name, held)


def _refused(where: str, kind: str, hooks: dict[int, Any]) -> CaptureError:
    hook = next(iter(hooks.values()))
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return CaptureError(
        f"{where} has a hook on gradients ({kind}: {name}), which a captured graph would not run",
        next_step=REMEDY,
    )


def registers_hook(func: Callable[..., Any]) -> bool:
    """Whether a call, seen by a torch function mode, puts a hook on a tensor."""
    return func in (torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)


@contextmanager
def no_hooks_in_forward() -> Iterator[None]:
    """While active, a forward that exchanges what autograd saves, or waits for the gradients of
    several tensors, raises `GradientHook`.

    torch's own hooks (checkpoint, save_on_cpu) give back the values that were saved.
    """
    graph: Any = torch.autograd.graph
    hooks, several = graph.saved_tensors_hooks, graph.register_multi_grad_hook
    before = hooks.__enter__

    def enter(self: Any) -> Any:
        made_by = (type(self).__module__, getattr(self.pack_hook, "__module__", None) or "")
        if not all(name.partition(".")[0] == "torch" for name in made_by):
            raise GradientHook("saved_tensors_hooks is entered in the forward")
        return before(self)

    def register(*args: Any, **kwargs: Any) -> Any:
        raise GradientHook("register_multi_grad_hook is called in the forward")

    hooks.__enter__, graph.register_multi_grad_hook = enter, register
    try:
        yield
    finally:
        hooks.__enter__, graph.register_multi_grad_hook = before, several
