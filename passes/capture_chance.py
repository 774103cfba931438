"""Numbers that a forward draws from Python's or numpy's generators: they would be fixed at capture.

torch.rand is an op of the graph and draws in every step; random.random() runs once, while the
model is traced. A forward that seeds the generator itself draws the same every time: it may.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
from torch import nn

# Functions of numpy.random that are no methods of its global generator.
_UNBOUND = ("seed", "default_rng")
_SEEDING = ("seed", "setstate", "set_state")
# What a generator is called -> what tells its state.
Generators = dict[str, Callable[[], str]]


class PythonChance(RuntimeError):
    """A forward that draws numbers outside torch."""

    def __init__(self, drawn_by: str) -> None:
        super().__init__(
            f"{drawn_by} draws a number while the model is traced: it would be the same in every "
            "step"
        )


@contextmanager
def no_python_chance(model: nn.Module) -> Iterator[None]:
    """While active, a draw by `random` or `numpy.random` raises `PythonChance` at its line; one by
    a name that was imported before, or by a generator that the model holds, at the end."""
    seeded: list[str] = []
    held = _generators(model)
    before = {name: state() for name, state in held.items()}
    patched = [*_patch(random, seeded), *_patch(np.random, seeded)]
    try:
        yield
    finally:
        for module, name, function in patched:
            setattr(module, name, function)
    for name, state in held.items():
        if state() != before[name] and name not in seeded:
            raise PythonChance(name)


def _generators(model: nn.Module) -> Generators:
    """The generators that can be looked at, by name: the two global ones and the model's own."""
    found: Generators = {
        "random": lambda: str(random.getstate()),
        "numpy.random": lambda: _digits(np.random.get_state()),
    }
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            label = f"the generator {f'{path}.{name}'.lstrip('.')!r}"
            if isinstance(value, random.Random | np.random.Generator):
                found[label] = partial(_state, value)
    return found


def _state(generator: random.Random | np.random.Generator) -> str:
    if isinstance(generator, random.Random):
        return str(generator.getstate())
    return str(generator.bit_generator.state)


def _digits(state: Any) -> str:
    return " ".join(v.tobytes().hex() if isinstance(v, np.ndarray) else str(v) for v in state)


def _patch(module: ModuleType, seeded: list[str]) -> list[tuple[ModuleType, str, Any]]:
    """Exchange the functions of a module that draw; returns what they were."""
    label = module.__name__
    found = []
    for name in module.__all__:
        function = getattr(module, name)
        bound = getattr(function, "__self__", None) is not None
        if name in ("getstate", "get_state") or not (bound or name in _UNBOUND):
            continue
        found.append((module, name, function))
        setattr(module, name, _watched(function, label, name, seeded))
    return found


def _watched(function: Any, label: str, name: str, seeded: list[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if name in _SEEDING:
            seeded.append(label)
        elif name == "default_rng" and (args or kwargs) and args[:1] != (None,):
            pass  # of a seed that is given
        elif label not in seeded and "/torch/" not in sys._getframe(1).f_code.co_filename:
            raise PythonChance(f"{label}.{name}")
        return function(*args, **kwargs)

    return call
