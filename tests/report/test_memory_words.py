"""The memory formulas of a plan, in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.errors import PlanError
from autopar.plan_document import Plan
from autopar.report.memory_words import memory_lines, memory_title
from autopar.report.text import explain
from tests.report.sample import make_plan

GIB = 1024**3


def with_formulas(**more: object) -> Plan:
    plan = make_plan()
    told = {
        "rank": 1,
        "live": [3],
        "values": {"n": 1000, "d": 4},
        "terms": {
            "optimizer": [{"text": "2·4·n/d", "bytes": 2 * GIB}],
            "activations": [
                {"text": "6 × 2.0 GiB of layers.0", "bytes": 12 * GIB},
                {"text": "given back by then", "bytes": -GIB},
            ],
        },
        **more,
    }
    return replace(plan, predicted={**plan.predicted, "memory_formulas": told})


def test_terms_are_told_with_their_sums() -> None:
    plan = with_formulas()
    assert memory_lines(plan) == [
        "optimizer: 2·4·n/d = 2.0 GiB.",
        "activations: 6 × 2.0 GiB of layers.0 [12.0 GiB] - given back by then [1.0 GiB] "
        "= 11.0 GiB.",
        "with n = 1,000 (parameters on the rank), d = 4 (ranks that share them).",
    ]
    assert f"in a backward with 3 of {plan.microbatches} micro-batches" in memory_title(plan)
    assert memory_title(plan) in explain(plan)


def test_chunks_and_the_end_of_a_step() -> None:
    assert "2, 1 micro-batches alive in its 2 chunks" in memory_title(with_formulas(live=[2, 1]))
    assert "at the end of the step" in memory_title(with_formulas(live=[]))


def test_plans_of_before_have_none() -> None:
    assert memory_lines(make_plan()) == []
    assert "Memory of" not in explain(make_plan())


def test_a_term_of_text_is_refused() -> None:
    plan = with_formulas(terms={"optimizer": [{"text": "n", "bytes": "many"}]})
    with pytest.raises(PlanError, match=r"memory_formulas\.terms\.optimizer\[0\]\.bytes is 'many'"):
        Plan.from_dict(plan.to_dict())
