"""A model's inputs, however nested, as named tensors.

    {"x": {"a": t, "b": [u]}}   ->   x_a, x_b_0

Mappings, lists, tuples and dataclasses are walked; anything else that is no tensor is fixed: a part
of the program, not of a batch.
"""

from __future__ import annotations

import builtins
import dataclasses
import keyword
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autopar.errors import UsageError

Inputs = Mapping[str, Any] | Sequence[Any]


def flatten_inputs(inputs: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the fixed values among inputs, each by the names on the way to it.

    Raises `UsageError` when two values get the same name.
    """
    tensors: dict[str, torch.Tensor] = {}
    fixed: dict[str, Any] = {}
    for path, value in _leaves(inputs, ()):
        name = re.sub(r"\W", "_", "_".join(path))
        if keyword.iskeyword(name) or hasattr(builtins, name) or not name.isidentifier():
            name = f"{name}_"  # a graph has to be valid Python
        if name in tensors or name in fixed:
            raise UsageError(
                f"two inputs are called {name!r} when nested names are joined",
                next_step="rename one of them",
            )
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            fixed[name] = value
    return tensors, fixed


def replace_tensors(value: Any, make: Callable[[torch.Tensor], Any]) -> Any:
    """The same nest with `make(tensor)` in the place of each tensor, in the order of the names."""
    if isinstance(value, torch.Tensor):
        return make(value)
    members = _members(value)
    if members is None:
        return value
    made = {key: replace_tensors(member, make) for key, member in members.items()}
    if isinstance(value, Mapping):
        # A tokenizer's batch becomes a dict: it is read by key all the same.
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(value, **made)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*made.values())
    return tuple(made.values()) if isinstance(value, tuple) else list(made.values())


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    members = None if isinstance(value, torch.Tensor) else _members(value)
    if members is None:
        yield path, value
        return
    for key, member in members.items():
        yield from _leaves(member, (*path, str(key)))


def _members(value: Any) -> dict[Any, Any] | None:
    """What a nest holds, by key, field or position; None for what is no nest."""
    if isinstance(value, Mapping):
        return dict(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, list | tuple):
        names = getattr(value, "_fields", range(len(value)))
        return dict(zip(names, value, strict=True))
    return None
