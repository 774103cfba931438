"""Single changes of a plan, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan_document import Plan
from autopar.report.neighbour_words import neighbours, neighbours_title
from autopar.report.text import explain
from tests.report.sample import make_plan


def with_neighbour(pins: str = "", **told: object) -> Plan:
    plan = make_plan()
    search = {**plan.predicted.get("search", {}), "pins": pins}
    known = {**plan.predicted, "step_seconds": 4.0, "search": search, "neighbours": [told]}
    return replace(plan, predicted=known)


def test_what_changes_along_is_told() -> None:
    plan = make_plan()
    size, mesh = plan.microbatch, str(plan.mesh)
    same = {"mesh": mesh, "schedule": plan.schedule, "chunks": plan.chunks, "zero": plan.zero}
    same["microbatch"] = {"size": size, "count": 4}
    told = with_neighbour(change="PP 2", step_seconds=5.0, **same)
    assert neighbours(told) == ["PP 2: 5.00 s, 25.0 % slower."]
    other = {"schedule": "zbv", "chunks": 2, "microbatch": {"size": 4 * size, "count": 1}}
    told = with_neighbour(change="PP 2", step_seconds=5.0, **{**same, **other})
    (text,) = neighbours(told)
    assert text.startswith(f"PP 2, with V-shaped zero-bubble and micro-batches of {4 * size}: 5.00")
    assert text in explain(told)
    moved = {**same, "zero": 3 - plan.zero, "mesh": "dp2 pp4 tp8"}
    (text,) = neighbours(with_neighbour(change="micro-batch of 2", step_seconds=5.0, **moved))
    assert text.startswith(f"Micro-batch of 2, with ZeRO-{3 - plan.zero} and DP outermost: ")


@pytest.mark.parametrize(
    "change", ["schedule zbv", "one chunk", "3 chunks", "ZeRO-3", "PP outermost"]
)
def test_the_change_itself_is_not_told_twice(change: str) -> None:
    plan = make_plan()
    other: dict[str, object] = {"mesh": str(plan.mesh), "step_seconds": 5.0}
    if change.startswith("ZeRO"):
        other["zero"] = 3
    elif "outermost" in change:
        other["mesh"] = f"dp{plan.mesh.dp} pp{plan.mesh.pp} tp{plan.mesh.tp}"
    else:
        other |= {"schedule": "zbv", "chunks": 2}
    (text,) = neighbours(with_neighbour(change=change, **other))
    assert "with" not in text


def test_the_title_names_what_is_free() -> None:
    title = "One decision changed; {} chosen anew:"
    assert neighbours_title(make_plan()) == title.format("cuts, placements and recomputation")
    pinned = with_neighbour("pp=2,recompute=a+b", change="TP 2")
    assert neighbours_title(pinned) == title.format("cuts and placements")
    pinned = with_neighbour("cuts=a,recompute=none", change="TP 2")
    assert neighbours_title(pinned) == title.format("placements")
