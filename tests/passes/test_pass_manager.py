"""The pass manager: order, times, dumps, and failures that name the pass."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from autopar.errors import PassError, PlanError
from autopar.parts import Parts
from autopar.passes.pass_manager import run_passes
from tests.passes import toys


@dataclass(frozen=True)
class Grow:
    """Writes a size, or raises what it is given."""

    name: str
    error: Exception | None = None

    def run(self, parts: Parts) -> Parts:
        if self.error is not None:
            raise self.error
        return parts.evolve(sizes={**parts.sizes, self.name: len(parts.sizes)})


def parts() -> Parts:
    return Parts(toys.simplified("mlp"))


def test_passes_run_in_order_and_are_verified_and_timed() -> None:
    seen: list[tuple[str, int]] = []
    result, report = run_passes(
        parts(), [Grow("a"), Grow("b")], verify=lambda p, name: seen.append((name, len(p.sizes)))
    )
    assert result.sizes == {"a": 0, "b": 1}
    assert seen == [("a", 1), ("b", 2)]
    assert list(report.seconds) == ["a", "b"] and all(s >= 0 for s in report.seconds.values())


def test_a_dump_is_the_text_after_that_pass() -> None:
    _, report = run_passes(parts(), [Grow("a"), Grow("b")], dump_after=["b"])
    assert list(report.dumps) == ["b"] and "cross_entropy_loss" in report.dumps["b"]


def test_a_failure_names_the_pass() -> None:
    with pytest.raises(PassError, match="pass a failed: ValueError: bad") as info:
        run_passes(parts(), [Grow("a", ValueError("bad"))])
    assert "--dump-after a" in info.value.next_step


def test_an_error_of_ours_passes_through() -> None:
    with pytest.raises(PlanError, match="^no such op"):
        run_passes(parts(), [Grow("a", PlanError("no such op"))])


def test_a_failed_verification_stops_the_road() -> None:
    def refuse(_: Parts, name: str) -> None:
        raise PassError(f"after {name}: broken")

    with pytest.raises(PassError, match="after a: broken"):
        run_passes(parts(), [Grow("a"), Grow("b", AssertionError())], verify=refuse)
