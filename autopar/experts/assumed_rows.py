"""How many rows experts are taken to get where there are no values: on meta, for memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import ceil

_IMBALANCE: ContextVar[float] = ContextVar("imbalance", default=1.0)


@contextmanager
def imbalance(factor: float) -> Iterator[None]:
    """Ranks that hold a part of the experts get `factor` times their even share in it."""
    token = _IMBALANCE.set(factor)
    try:
        yield
    finally:
        _IMBALANCE.reset(token)


def assumed_rows(even: int) -> int:
    """Of an even share, what is taken to come."""
    factor = _IMBALANCE.get()
    return even if factor == 1.0 else ceil(even * factor)
