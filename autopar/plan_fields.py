"""The fields of a plan's JSON document by type; an error names the field and what was expected."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from autopar.errors import PlanError

# JSON numbers above it are not kept exactly by every reader, and no size is near it.
LARGEST = 2**53
_SHOWN = 60

Check = Callable[[str, Any], Any]


def wrong(name: str, value: Any, expected: str) -> PlanError:
    """`name` is the way to the field, as `stages[1].blocks`."""
    return PlanError(f"{name} is {shown(value)}", next_step=f"give {expected}")


def shown(value: Any) -> str:
    """The value as Python writes it, cut where it gets long."""
    try:
        found = repr(value)
    except ValueError:  # Python does not write a number of more than 4300 digits
        return "a number of thousands of digits"
    return found if len(found) <= _SHOWN else f"{found[:_SHOWN]}…"


def text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, value, "a text")
    return value


def whole(name: str, value: Any, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= LARGEST:
        raise wrong(name, value, f"a whole number of at least {least}")
    return value


def count(name: str, value: Any) -> int:
    return whole(name, value, 0)


def amount(name: str, value: Any) -> float:
    """Seconds, bytes, fractions: finite, and negative at most by rounding."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not -1e-6 <= value <= 1e30 or not math.isfinite(value):
        raise wrong(name, value, "a number of at least 0")
    return float(value)


def change(name: str, value: Any) -> int:
    """A whole number of either sign."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > LARGEST:
        raise wrong(name, value, "a whole number")
    return value


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def one_of(name: str, value: Any, allowed: tuple[Any, ...]) -> Any:
    if not any(type(value) is type(a) and value == a for a in allowed):
        raise wrong(name, value, f"one of {list(allowed)}")
    return value


def items(name: str, value: Any, check: Check) -> tuple[Any, ...]:
    """A list whose entries pass `check`."""
    if not isinstance(value, list | tuple):
        raise wrong(name, value, "a list")
    return tuple(check(f"{name}[{i}]", entry) for i, entry in enumerate(value))


def entries(name: str, value: Any, check: Check) -> dict[str, Any]:
    """An object of any keys whose values pass `check`."""
    if not isinstance(value, Mapping):
        raise wrong(name, value, "a JSON object")
    return {text(f"a key of {name}", k): check(f"{name}.{k}", v) for k, v in value.items()}


def members(
    name: str, value: Any, required: Mapping[str, Check], optional: Mapping[str, Check]
) -> dict[str, Any]:
    """An object of these keys and no others."""
    if not isinstance(value, Mapping):
        raise wrong(name, value, "a JSON object")
    known = {**required, **optional}
    unknown, missing = set(map(str, value)) - set(known), set(required) - set(value)
    if unknown or missing:
        raise PlanError(
            f"{name}: unknown {sorted(unknown)}, missing {sorted(missing)}",
            next_step=f"give the fields {', '.join(known)}",
        )
    way = "" if name == PLAN else f"{name}."
    return {k: known[k](f"{way}{k}", v) for k, v in value.items()}


# The name of the whole document: its fields are called by their own names alone.
PLAN = "plan fields"


def told(name: str, value: Any, checks: Mapping[str, Check]) -> dict[str, Any]:
    """An object that may hold more than is read; what is read passes its check, or is null."""
    if not isinstance(value, Mapping):
        raise wrong(name, value, "a JSON object")
    for key, check in checks.items():
        if value.get(key) is not None:
            check(f"{name}.{key}", value[key])
    return dict(value)
