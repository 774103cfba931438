"""What Python state a call of a module depends on, as values that can be compared.

A digest stands for a value: two digests are equal only if code that reads the values can't tell
them apart (but by `is` or `id`). Objects are compared by what they hold; what hides its state
(an iterator, a generator, a lock) raises `Opaque`: nothing is known about it.
"""

from __future__ import annotations

import enum
import functools
import logging
import sys
import types
from abc import ABC
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, Generic, Protocol

import torch
from torch import nn

Digest = Any
_LIMIT = 20_000  # values in one digest: beyond that it costs more than it saves

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range,
    slice, torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum,
)  # fmt: skip
# Values whose code can't change between two calls of one capture.
_FIXED = (
    type, types.ModuleType, types.BuiltinFunctionType, types.MethodDescriptorType, types.CodeType,
    types.WrapperDescriptorType, types.GetSetDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.MemberDescriptorType, types.GenericAlias, property,
    logging.Logger,
)  # fmt: skip
_FIXED_FROM = {"torch", "typing", "types", "re", "inspect"}
# What torch.nn.Module keeps for itself: compared as structure, not as values.
OWN_OF_MODULE = frozenset(
    [*vars(nn.Module()), "_is_full_backward_hook", "_compiled_call_impl"]
) - {"training"}  # fmt: skip


class Opaque(Exception):
    """A value whose state can't be read."""


class Same:
    """Equal only for the same object, which it keeps alive."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.held is other.held

    def __hash__(self) -> int:
        return id(self.held)


class Digester:
    """Digests with the tensors and modules of one layer named by their place in it.

    `places`: id of such a tensor, or of a module's `__dict__` -> its place.
    """

    def __init__(self, places: Mapping[int, str]) -> None:
        self.places = places
        self._seen: dict[int, int] = {}
        self._kept: list[Any] = []

    def __call__(self, value: Any) -> Digest:
        kind = type(value)
        if kind in _PLAIN or isinstance(value, enum.Enum):
            # By text: nan differs from itself, 0.0 equals -0.0.
            return kind, repr(value) if kind in (float, complex, range, slice) else value
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return kind, str(value.node.expr)
        if isinstance(value, torch.Tensor):
            place = self.places.get(id(value))
            return ("tensor", place) if place is not None else ("tensor", Same(value))
        if isinstance(value, nn.Module):
            here = self.places.get(id(value.__dict__))
            return ("module", here) if here is not None else self._compound(value)
        if isinstance(value, _FIXED) or kind.__module__.partition(".")[0] in _FIXED_FROM:
            return Same(value)
        if isinstance(value, ContextVar):
            return Same(value), self(value.get(None))
        return self._compound(value)

    def _compound(self, value: Any) -> Digest:
        key = id(value.__dict__) if isinstance(value, nn.Module) else id(value)
        if key in self._seen:
            return "again", self._seen[key]
        if len(self._seen) > _LIMIT:
            raise Opaque("too much state")
        self._seen[key] = len(self._seen)
        self._kept.append(value)
        return self._held_by(value)

    def _held_by(self, value: Any) -> Digest:
        kind = type(value)
        if isinstance(value, types.FunctionType):
            cells = [_content(c) for c in value.__closure__ or ()]
            own = (value.__defaults__, value.__kwdefaults__, value.__dict__)
            return "function", Same(value.__code__), self._each(cells), self._each(own)
        if isinstance(value, types.MethodType):
            return "method", self(value.__func__), self(value.__self__)
        if isinstance(value, functools.partial):
            return "partial", self._each((value.func, value.args, value.keywords))
        if isinstance(value, staticmethod | classmethod):
            return kind, self(value.__func__)
        if isinstance(value, nn.Module):
            return kind, Same(value), self.attributes(value)
        held: list[Digest] = []
        if isinstance(value, tuple | list | deque):
            held += [self(v) for v in value]
        elif isinstance(value, dict | types.MappingProxyType):
            held += [(self(k), self(v)) for k, v in value.items()]
        elif isinstance(value, set | frozenset):
            held.append(frozenset(self(v) for v in value))
        elif isinstance(value, str | int | float | bytes):
            held.append(repr(value))
        elif not _is_python_object(kind):
            raise Opaque(f"a {kind.__module__}.{kind.__qualname__}")
        state = [*_slots(value)]
        if hasattr(value, "__dict__"):
            state += vars(value).items()
        return kind, tuple(held), tuple((k, self(v)) for k, v in state)

    def _each(self, values: Iterable[Any]) -> Digest:
        return tuple(self(v) for v in values)

    def attributes(self, module: nn.Module) -> Digest:
        """All attributes of a module that are not its parameters, buffers, children or hooks."""
        return tuple((k, self(v)) for k, v in module.__dict__.items() if k not in OWN_OF_MODULE)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_python_object(kind: type) -> bool:
    """Whether all the state of such objects is in `__dict__` and `__slots__`."""
    known = (object, tuple, list, deque, dict, OrderedDict, defaultdict, set, frozenset)
    known = (*known, str, int, float, bytes, Generic, Protocol, ABC)  # type: ignore[assignment]
    return all(
        k in known
        or k.__module__ in ("collections.abc", "enum")
        or "__slots__" in vars(k)
        or any("__dict__" in vars(base) for base in k.__mro__)
        for k in kind.__mro__
    )


def _slots(value: Any) -> Iterable[tuple[str, Any]]:
    for kind in type(value).__mro__:
        names = kind.__dict__.get("__slots__", ())
        for name in (names,) if isinstance(names, str) else tuple(names):
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


class CodeState:
    """Globals, closures and class attributes that the code of some classes can reach.

    Found by the names in the code of `forward` and of all that it names in turn. What code gets at
    in other ways (a function out of a table, `sys.modules`) is not seen.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places: dict[tuple[int, str], tuple[Any, str]] = {}
        self._cells: dict[int, types.CellType] = {}
        self._visited: set[int] = set()
        self._names = {"forward", "__call__"}
        parts = reachable_code(modules)
        self._classes = [p for p in parts if isinstance(p, type) and not _of_library(p)]
        for kind in self._classes:
            self._member(kind, "forward", {"forward"})
        # What attributes hold is called by names that only now are all known.
        for part in parts:
            self._value(part, self._names)

    def _member(self, kind: type, name: str, names: set[str]) -> None:
        for owner in kind.__mro__:
            if name in vars(owner):
                if not _of_library(owner):
                    self._place(owner, name, names)
                return

    def _place(self, owner: Any, name: str, names: set[str]) -> None:
        """A name in a class, or in the `__dict__` of a Python module; `names`: of that code."""
        key = id(owner), name
        if key not in self._places:
            self._places[key] = owner, name
            self._value(_in(owner, name), names)

    def _value(self, value: Any, names: set[str]) -> None:
        """Go on into a value that code names, by the other names in that code."""
        value = getattr(value, "__func__", value)
        if isinstance(value, property):
            self._value(value.fget, names)
        elif isinstance(value, functools.partial):
            self._value(value.func, names)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.ModuleType):
            for name in names & vars(value).keys() if not _of_library(value) else ():
                self._place(vars(value), name, names)
        elif isinstance(value, type):
            for name in {*names, "__init__", "forward"}:
                self._member(value, name, names)
        else:
            for name in names:
                self._member(type(value), name, names)

    def _function(self, function: types.FunctionType) -> None:
        if id(function) in self._visited or _of_library(function):
            return
        self._visited.add(id(function))
        names = set(_names(function.__code__))
        self._names = self._names | names
        for name in names & function.__globals__.keys():
            self._place(function.__globals__, name, names)
        for cell in function.__closure__ or ():
            self._cells[id(cell)] = cell
            self._value(_content(cell), names)
        for kind in self._classes:
            for name in names:
                self._member(kind, name, names)

    def digest(self, digester: Digester) -> Digest:
        """Of all that was found, as it is now."""
        found = [_in(owner, name) for owner, name in self._places.values()]
        found += [_content(c) for c in self._cells.values()]
        return tuple(digester(v) for v in found)


def reachable_code(modules: Iterable[nn.Module]) -> tuple[Any, ...]:
    """Classes of the modules and of what their attributes hold, and functions held there."""
    found: dict[int, Any] = {}
    for module in modules:
        held = [v for k, v in module.__dict__.items() if k not in OWN_OF_MODULE]
        for value in (module, *held):
            value = getattr(value, "__func__", value)
            code = value if isinstance(value, types.FunctionType | type) else type(value)
            if not _of_library(code):
                found.setdefault(id(code), code)
    return tuple(found.values())


def _in(owner: Any, name: str) -> Any:
    return (vars(owner) if isinstance(owner, type) else owner).get(name)


def _names(code: types.CodeType) -> Iterable[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant  # getattr(self, "name"), globals()["NAME"]


_LIBRARY = {"torch", *sys.stdlib_module_names}


def _of_library(value: Any) -> bool:
    """Code of torch and of Python itself keeps no state that a layer could read."""
    module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
    return str(module).partition(".")[0] in _LIBRARY - {"__main__"}


def ambient() -> Digest:
    """torch's switches that change what a forward does."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )
