"""How a plan with ep is told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.mesh import Mesh
from autopar.plan_document import Plan
from autopar.report.expert_words import copies_sentence, expert_part, expert_sentence
from autopar.report.page import render
from autopar.report.text import explain
from tests.report import sample
from tests.report.test_text import printed


def with_ep(ep: int, experts: int = 64) -> Plan:
    plan = sample.make_plan(mesh=Mesh(4, 8, 1))
    predicted = {**plan.predicted, "experts": experts}
    return replace(plan, mesh=Mesh(4, 8, 1, ep=ep), predicted=predicted)


@pytest.mark.parametrize(
    ("ep", "part", "rest"),
    [(4, "16 of 64", "; 2 ranks hold the same experts"), (8, "8 of 64", "No other rank holds")],
)
def test_what_each_rank_holds(ep: int, part: str, rest: str) -> None:
    told = expert_sentence(with_ep(ep))
    assert f"Each of {ep} ep ranks, neighbours among the 8 replicas, holds {part} experts" in told
    assert rest in told and told in explain(with_ep(ep))
    shown = " ".join(printed(with_ep(ep), width=140).split())
    assert f"ep{ep}" in shown and f"{part} experts of a layer on each ep rank" in shown
    assert f"ep {ep}</b> within the replicas" in render(with_ep(ep), (), None)


def test_how_much_of_the_exchange_is_hidden() -> None:
    plan = with_ep(4)
    assert "behind shared experts" not in expert_sentence(plan)
    plan = replace(plan, predicted={**plan.predicted, "experts_hidden": 0.625})
    assert "(all-to-all), 62% of that time behind shared experts; 2 ranks" in expert_sentence(plan)
    assert Plan.from_dict(plan.to_dict()) == plan


def test_what_copies_may_take() -> None:
    plan = replace(sample.make_plan(), spare_experts=2)
    assert copies_sentence(plan) == ""
    plan = replace(plan, predicted={**plan.predicted, "copies_seconds": 0.0125})
    assert "2 spare slots of a layer: were there a copy in each" in copies_sentence(plan)
    assert "would take 12.5 ms at the end of a step" in explain(plan)
    assert Plan.from_dict(plan.to_dict()) == plan


def test_without_ep_nothing_is_said_of_it() -> None:
    plan = sample.make_plan()
    assert expert_sentence(plan) == "" and "ep rank" not in printed(plan)
    assert expert_part(replace(with_ep(4), predicted={})) == "a part of them"
