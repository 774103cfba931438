"""The plan document: written, read back, and refused when a field is wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.cost.optimizer import OPTIMIZERS as PRICED
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.plan_document import OPTIMIZERS, Plan, StagePlan, recompute_label
from tests.passes import toys
from tests.report import sample


def made() -> Plan:
    stages = (StagePlan(("embed", "layers.0"), ("layers.0",)), StagePlan(("layers.1", "head")))
    plan = toys.plan(
        "mlp", mesh=Mesh(pp=2, tp=2), stages=stages, placements={"layers.0": toys.MEGATRON}
    )
    return replace(plan, cluster="cpu:4")


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
        ({"mesh": {"up": 2}}, r"mesh: unknown \['up'\]"),
        ({"mesh": {"cp": 0}}, "mesh.cp is 0"),
        ({"mesh": {"ep": 0}}, "mesh.ep is 0"),
        ({"stages": [{"blocks": ["a"]}]}, r"stages\[0\]: .*missing \['recompute'\]"),
        ({"stages": 3}, "stages is 3"),
        ({"zero": 1.0}, "zero is 1.0"),
        ({"boundary": "P"}, "boundary is 'P'"),
        ({"optimizer": "lion"}, "optimizer is 'lion'"),
        ({"kinds": {"embed": "embed"}}, "kinds.embed is 'embed'"),
        ({"notes": "all good"}, "notes is 'all good'"),
        ({"placements": {"embed": {"linear": 1}}}, "placements.embed.linear is 1"),
        ({"placements": {"embed": {"parameter a.b": ""}}}, "placements.embed.parameter a.b is ''"),
        ({"placements": {"embed": {"parameter w": "P"}}}, "placements.embed.parameter w is 'P'"),
        ({"microbatch": 10**400}, "microbatch is 1000"),
        ({"predicted": {"step_seconds": "fast"}}, "predicted.step_seconds is 'fast'"),
        (
            {"predicted": {"memory_per_stage": [{"total": -5}]}},
            r"predicted.memory_per_stage\[0\].total is -5",
        ),
        (
            {"predicted": {"search": {"seconds": {"capture": None}}}},
            "predicted.search.seconds.capture is None",
        ),
        ({"predicted": {"recipes": [{"fits": "no"}]}}, r"recipes\[0\].fits is 'no'"),
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
        ("[" * 100_000, "is not JSON"),
        ('{"version": ' + "1" * 5000 + "}", "is not JSON"),
    ):
        path = tmp_path / "plan.json"
        path.write_text(text)
        with pytest.raises(PlanError, match=message):
            Plan.load(path)
    with pytest.raises(PlanError, match="can't read the plan"):
        Plan.load(tmp_path)
    document = made().to_dict()
    del document["zero"]
    with pytest.raises(PlanError, match=r"missing \['zero'\]"):
        Plan.from_dict(document)


def test_the_optimizers_are_those_that_have_a_price() -> None:
    assert set(OPTIMIZERS) == set(PRICED)


@pytest.mark.parametrize(
    ("whole", "part", "label"),
    [(0, 0, "none"), (4, 0, "full"), (0, 4, "selective"), (1, 0, "1/4 blocks"),
     (0, 3, "3/4 blocks in part"), (1, 2, "1/4 blocks, 2 in part")],
)  # fmt: skip
def test_the_label_tells_whole_and_in_part(whole: int, part: int, label: str) -> None:
    names = ("a", "b", "c", "d")
    chosen = dict.fromkeys(names[whole : whole + part], "set 1")
    stage = StagePlan(names, names[:whole], chosen)
    assert recompute_label([stage]) == label
    assert stage.recomputed == {**dict.fromkeys(names[:whole], "full"), **chosen}


def test_blocks_that_are_kept_gathered_are_read_back(tmp_path: Path) -> None:
    plan = sample.make_plan(layers=8)
    kept = tuple(replace(s, keep_gathered=s.blocks[-1:]) for s in plan.stages)
    mesh = replace(plan.mesh, dp=2)
    fields = {"zero": 3, "stages": kept, "mesh": mesh, "predicted": {}, "cluster": ""}
    plan = replace(plan, **fields, global_batch=2 * plan.microbatch * plan.microbatches)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    document = plan.to_dict()
    assert document["stages"][0]["keep_gathered"] == kept[0].keep_gathered
    assert plan.keep_label == f"{len(kept)}/{sum(len(s.blocks) for s in kept)} blocks"
    # A plan without any, and one from before there were some, has no such field.
    for stage in document["stages"]:
        del stage["keep_gathered"]
    old = Plan.from_dict(document)
    assert old.keep_label == "" and old.to_dict() == document
    every = replace(plan, stages=tuple(replace(s, keep_gathered=s.blocks) for s in kept))
    assert every.keep_label == "all blocks"
