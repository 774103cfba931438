"""A module that may be repeated in a model: its parts, what it is made of, what its parts hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.passes.capture_reads import ALL, can_record
from autopar.passes.capture_segment import describe
from autopar.passes.capture_state import Digest, Digester, Same

_MISSING = Same(object())
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN = vars(nn.Module()).keys()


class Layer:
    """A module that may be repeated, and all below it by place ('' for itself)."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = dict(module.named_modules(remove_duplicate=False))
        self.places: dict[int, str] = {}
        for place, part in self.modules.items():
            self.places.setdefault(id(part.__dict__), place or ".")

    def own(self) -> dict[str, torch.Tensor]:
        """Its parameters and buffers, as they are while the tracer has exchanged them."""
        return {
            f"{place}.{name}": tensor
            for place, part in self.modules.items()
            for held in (part.__dict__["_parameters"], part.__dict__["_buffers"])
            for name, tensor in held.items()
            if tensor is not None
        }

    def attribute(self, place: str, name: str, digester: Digester) -> Digest:
        """What a read of an attribute of a part gives, without reading it."""
        part = self.modules["" if place == "." else place]
        if name == ALL:
            return digester.attributes(part)
        state = part.__dict__
        if name in state:
            hidden = name.startswith("_") and name in _OWN
            return None if hidden else digester(state[name])
        for kind in ("_parameters", "_buffers", "_modules"):
            if name in state[kind]:
                return digester(state[kind][name])
        return _MISSING

    def hooked(self) -> bool:
        return any(getattr(m, kind, None) for m in self.modules.values() for kind in _HOOKS)


def structure(module: nn.Module) -> Digest:
    """Classes, names, shapes and ties of a module and all below it."""
    first: dict[int, int] = {}

    def tie(thing: Any) -> int:
        return first.setdefault(id(thing), len(first))

    def tensor(value: torch.Tensor | None) -> Digest:
        if value is None:
            return None
        return describe(value), value.requires_grad, tie(value), type(value)

    return tuple(
        (
            name,
            type(part),
            tie(part),
            tuple((k, tensor(v)) for k, v in part._parameters.items()),
            tuple((k, tensor(v)) for k, v in part._buffers.items()),
            tuple(sorted(part._non_persistent_buffers_set)),
            tuple(k for k, v in part._modules.items() if v is None),
        )
        for name, part in module.named_modules(remove_duplicate=False)
    )


def is_plain(module: nn.Module) -> bool:
    """Run by the `forward` of its class, and its attributes read in the usual way."""
    return "forward" not in module.__dict__ and can_record(module)


def global_hooks() -> bool:
    """Whether somebody listens to the calls of all modules."""
    module: Any = nn.modules.module
    return any(getattr(module, f"_global{kind}", None) for kind in _HOOKS)
