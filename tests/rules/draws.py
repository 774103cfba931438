"""What the generators of random calls draw from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from tests.rules.execution import Call

aten = torch.ops.aten
Draw = Callable[[Any], Any]
Case = Callable[[Draw], Call]
# The first is what the first example of a test takes: a size that divides by 2 and 4.
SIZE = st.sampled_from([4, 2, 8, 3, 1])
EVEN = st.sampled_from([4, 2, 8])


def real(*shape: int, grad: bool = True, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    return (torch.rand(shape, dtype=torch.float64) * (high - low) + low).requires_grad_(grad)


def shape(draw: Draw, least: int = 1, most: int = 3) -> list[int]:
    ranks = sorted(range(least, most + 1), key=lambda rank: abs(rank - 2))
    return [draw(SIZE) for _ in range(draw(st.sampled_from(ranks)))]


def broadcast(draw: Draw, to: list[int]) -> list[int]:
    """A shape that broadcasts to `to`: leading dims missing, others perhaps 1."""
    tail = to[draw(st.integers(0, len(to))) :]
    return [s if draw(st.booleans()) else 1 for s in tail]


def grad(draw: Draw) -> bool:
    return draw(st.sampled_from([True, True, True, False]))


def overload(name: str, kind: str = "default") -> Any:
    packet = getattr(aten, name)
    return getattr(packet, kind if kind in packet.overloads() else packet.overloads()[0])
