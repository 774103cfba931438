"""The plan document: written, read back, and refused when a field is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.plan_document import Plan, StagePlan
from tests.passes import toys


def made() -> Plan:
    stages = (StagePlan(("embed", "layers.0"), ("layers.0",)), StagePlan(("layers.1", "head")))
    return toys.plan(
        "mlp", mesh=Mesh(pp=2, tp=2), stages=stages, placements={"layers.0": toys.MEGATRON}
    )


def test_a_saved_plan_is_read_back_equal(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    made().save(path)
    assert Plan.load(path) == made()
    assert json.loads(path.read_text())["version"] == 1


def test_decisions_leave_predictions_out() -> None:
    plan = made()
    assert not {"predicted", "notes"} & set(plan.decisions())
    assert plan.decisions() == Plan.from_dict({**plan.to_dict(), "notes": ["x"]}).decisions()


def test_predictions_and_notes_may_be_missing() -> None:
    document = made().to_dict()
    del document["predicted"], document["notes"]
    assert Plan.from_dict(document) == made()


def test_recompute_label() -> None:
    assert made().recompute_label == "1/4 blocks"
    assert toys.plan("mlp").recompute_label == "none"
    names = ("embed", "layers.0", "layers.1", "head")
    assert toys.plan("mlp", stages=(StagePlan(names, names),)).recompute_label == "full"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "plan version 2"),
        ({"zero": 4}, "zero is 4"),
        ({"zero": True}, "zero is True"),
        ({"schedule": "zigzag"}, "schedule is 'zigzag'"),
        ({"precision": "int4"}, "precision is 'int4'"),
        ({"microbatch": 0}, "microbatch is 0"),
        ({"global_batch": "8"}, "global_batch is '8'"),
        ({"mesh": {"pp": 0}}, "mesh.pp is 0"),
        ({"mesh": {"up": 2}}, "malformed plan"),
        ({"stages": [{"blocks": ["a"]}]}, "malformed plan"),
        ({"stages": 3}, "malformed plan"),
        ({"sizes": {"batch": 1.5}}, "sizes.batch is 1.5"),
        ({"colour": "red"}, r"unknown \['colour'\]"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message) as info:
        Plan.from_dict({**made().to_dict(), **change})
    assert info.value.next_step


def test_files_that_are_no_plan(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no plan file"):
        Plan.load(tmp_path / "none.json")
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "a plan is a JSON object"),
        ("{}", "plan version None"),
    ):
        path = tmp_path / "plan.json"
        path.write_text(text)
        with pytest.raises(PlanError, match=message):
            Plan.load(path)
    document = made().to_dict()
    del document["zero"]
    with pytest.raises(PlanError, match=r"missing \['zero'\]"):
        Plan.from_dict(document)
