"""Fields of a plan by type: every value of another type is refused, by name."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.plan_fields import amount, count, flag, items, members, one_of, shown, told, whole


def test_what_is_right_comes_back() -> None:
    assert whole("n", 3) == 3 and count("n", 0) == 0 and flag("n", True) is True
    assert amount("n", 2) == 2.0 and amount("n", -1e-9) == -1e-9  # a rounded zero
    assert items("n", [1, 2], whole) == (1, 2)
    assert one_of("n", 1, (1, 2)) == 1
    assert told("n", {"a": 1, "b": "free", "c": None}, {"a": whole, "c": whole})["b"] == "free"


@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None, [], 2**60, 10**400])
def test_whole_numbers(value: object) -> None:
    with pytest.raises(PlanError, match="n is "):
        whole("n", value)


@pytest.mark.parametrize("value", [-1, True, "1", None, float("nan"), float("inf"), 10**400])
def test_amounts(value: object) -> None:
    with pytest.raises(PlanError, match="n is "):
        amount("n", value)


def test_a_closed_set_knows_types() -> None:
    for value in (True, 1.0, 3, [1]):
        with pytest.raises(PlanError, match=r"n is .*\n.*one of \[0, 1\]"):
            one_of("n", value, (0, 1))


def test_places_are_named() -> None:
    with pytest.raises(PlanError, match=r"n\[1\] is 'x'"):
        items("n", [1, "x"], whole)
    with pytest.raises(PlanError, match=r"n.a is 0"):
        members("n", {"a": 0}, {"a": whole}, {})
    with pytest.raises(PlanError, match=r"unknown \['b'\], missing \['a'\]"):
        members("n", {"b": 0}, {"a": whole}, {})


def test_long_values_are_cut() -> None:
    assert len(shown("x" * 1000)) < 70
    assert "digits" in shown(10**5000)
