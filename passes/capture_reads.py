"""Which attributes of which modules a stretch of code reads.

While a recording is open, `nn.Module.__getattribute__` is ours; modules keep their classes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

ALL = "*"  # the code looked at `__dict__`: it may have read anything
# Of torch and of the recording itself: they look at `__dict__` for what is in no attribute.
_NOT_READERS = str(Path(torch.__file__).parent), str(Path(__file__).parent)
_plain = object.__getattribute__


class Reads:
    """`found`: (place of the module, attribute); places are by id of a module's `__dict__`.

    A tracer's proxy of a module shares that `__dict__`.
    """

    def __init__(self) -> None:
        self._open: list[tuple[dict[int, str], set[tuple[str, str]]]] = []

    @contextmanager
    def recording(self, places: dict[int, str]) -> Iterator[set[tuple[str, str]]]:
        """The set that fills while the block runs; recordings may be nested."""
        found: set[tuple[str, str]] = set()
        self._open.append((places, found))
        if len(self._open) == 1:
            nn.Module.__getattribute__ = self._hook()  # type: ignore[method-assign]
        try:
            yield found
        finally:
            self._open.pop()
            if not self._open:
                del nn.Module.__getattribute__

    def note(self, module: nn.Module, name: str) -> None:
        """As if the code had read it."""
        key = id(_plain(module, "__dict__"))
        for places, found in self._open:
            if key in places:
                found.add((places[key], name))

    def _hook(self) -> Any:
        opened = self._open

        def __getattribute__(module: nn.Module, name: str) -> Any:  # noqa: N807
            key = id(_plain(module, "__dict__"))
            for places, found in opened:
                if key in places:
                    if name != "__dict__":
                        found.add((places[key], name))
                    elif not sys._getframe(1).f_code.co_filename.startswith(_NOT_READERS):
                        found.add((places[key], ALL))
            return _plain(module, name)

        return __getattribute__


def can_record(module: nn.Module) -> bool:
    """Not when a class has its own idea of how attributes are read."""
    return type(module).__getattribute__ in (object.__getattribute__, nn.Module.__getattribute__)
