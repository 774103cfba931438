"""The heaviest ops of a plan, in words."""

from __future__ import annotations

from dataclasses import replace

from autopar.plan_document import Plan
from autopar.report.op_words import class_sentence, heaviest
from autopar.report.text import explain
from tests.report.sample import make_plan


def with_ops(*ops: dict[str, object]) -> Plan:
    plan = make_plan()
    return replace(plan, predicted={**plan.predicted, "step_seconds": 4.0, "heaviest_ops": ops})


def test_an_op_is_told_with_its_share_and_class() -> None:
    op = {"op": "linear", "module": "layers.0.mlp.up", "block": "layers.0", "count": 20}
    (text,) = heaviest(with_ops({**op, "bound": "compute", "seconds": 1.0}))
    assert text == "linear of mlp.up in layers.0 (×20): 1.00 s, 25.0 % of the step, compute-bound."
    assert text in explain(with_ops({**op, "bound": "compute", "seconds": 1.0}))


def test_an_op_of_no_module_and_one_block() -> None:
    op = {"op": "add", "module": "head", "block": "head", "count": 1, "bound": "memory"}
    (text,) = heaviest(with_ops({**op, "seconds": 0.04}))
    assert text == "add in head: 40.0 ms, 1.0 % of the step, memory-bound."


def test_plans_of_before_have_none() -> None:
    assert heaviest(make_plan()) == []
    assert "Heaviest" not in explain(make_plan())


def test_classes_are_told_from_the_largest_on() -> None:
    plan = with_ops()
    seconds = {"memory": 1.0, "compute": 3.0, "communication": 0.0}
    plan = replace(plan, predicted={**plan.predicted, "class_seconds": seconds})
    told = class_sentence(plan)
    assert "limited by arithmetic 3.00 s (75.0 %), HBM 1.00 s (25.0 %)." in told
    assert told in explain(plan)
    assert class_sentence(make_plan()) == ""
