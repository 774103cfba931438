"""Digests: equal for values that code can't tell apart, different for all others."""

from __future__ import annotations

import functools
import random
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn

from autopar.passes.capture_state import CodeState, Digester, Opaque, ambient


def digest(value: Any, places: dict[int, str] | None = None) -> Any:
    return Digester(places or {})(value)


class Settings:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


def adder(n: int) -> Any:
    return lambda x: x + n


def test_equal_values_have_equal_digests() -> None:
    for make in (
        lambda: 3,
        lambda: [1, (2.0, "x"), {"a": None}],
        lambda: Settings(2.0),
        lambda: Slotted(2.0),
        lambda: adder(3),
        lambda: functools.partial(max, 3),
        lambda: Settings(2.0).__init__,  # type: ignore[misc]
        lambda: torch.float32,
    ):
        assert digest(make()) == digest(make())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        ([1], (1,)),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (Settings(1.0), Settings(2.0)),
        (Slotted(1.0), Slotted(2.0)),
        (adder(1), adder(2)),
        (functools.partial(max, 1), functools.partial(max, 2)),
        (torch.ones(2), torch.ones(2)),
        (nn.Linear(2, 2), nn.Linear(2, 2)),
        (torch.float32, torch.float16),
    ],
)
def test_values_that_differ_have_digests_that_differ(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)


def test_the_same_object_in_two_places_is_not_two_equal_objects() -> None:
    inner = [1]
    assert digest([inner, inner]) != digest([[1], [1]])
    loop: list[Any] = []
    loop.append(loop)
    assert digest(loop) == digest(loop)


def test_tensors_and_modules_of_the_layer_are_named_by_their_place() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    places = [{id(m.__dict__): "up", id(m.weight): "up.weight"} for m in (one, other)]
    assert digest([one, one.weight], places[0]) == digest([other, other.weight], places[1])


@pytest.mark.parametrize(
    "value", [iter([1]), random.Random(0), (i for i in ())], ids=lambda v: type(v).__name__
)
def test_hidden_state_is_not_taken_for_equal(value: Any) -> None:
    with pytest.raises(Opaque):
        digest(value)


def test_a_context_variable_is_what_it_holds() -> None:
    variable: ContextVar[int] = ContextVar("variable", default=1)
    before = digest(variable)
    token = variable.set(2)
    assert digest(variable) != before
    variable.reset(token)
    assert digest(variable) == before


TABLE = {"scale": 1}
UNUSED = {"scale": 1}


def indirectly() -> int:
    return TABLE["scale"]


class Reader(nn.Module):
    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.helper = Helper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x) * self.helper.offset()

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * indirectly() * self.count


class Helper:
    offsets = (1, 2)

    def offset(self) -> int:
        return self.offsets[0]


def test_state_that_code_reaches_through_calls_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    state = CodeState([Reader()])

    def now() -> Any:
        return state.digest(Digester({}))

    before = now()
    monkeypatch.setitem(UNUSED, "scale", 2)
    assert now() == before
    for change in (
        lambda m: m.setitem(TABLE, "scale", 2),
        lambda m: m.setattr(Reader, "count", 1),
        lambda m: m.setattr(Helper, "offsets", (3,)),
        lambda m: m.setattr(f"{__name__}.indirectly", lambda: 3),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert now() != before
    assert now() == before


def test_closures_are_seen() -> None:
    steps: list[int] = []

    class Closed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * len(steps)

    state = CodeState([Closed()])
    before = state.digest(Digester({}))
    steps.append(1)
    assert state.digest(Digester({})) != before


def test_switches_of_torch_are_seen() -> None:
    before = ambient()
    with torch.no_grad():
        assert ambient() != before
    with torch.autocast("cpu", torch.bfloat16):
        assert ambient() != before
    assert ambient() == before
