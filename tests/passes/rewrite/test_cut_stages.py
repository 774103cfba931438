"""Stages: cuts that fit the model, values that cross, parameters and who holds them."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.parts import Parts
from autopar.passes.pass_manager import run_passes
from autopar.passes.pipeline import back_pipeline
from autopar.plan_document import StagePlan
from tests.passes import toys

NAMES = ("embed", "layers.0", "layers.1", "head")


def staged(name: str, *stages: StagePlan, boundary: str = "R", tp: int = 1, **placements) -> Parts:  # type: ignore[no-untyped-def]
    plan = toys.plan(
        name, mesh=Mesh(pp=len(stages), tp=tp), stages=stages, boundary=boundary, **placements
    )
    return run_passes(toys.start(name, plan), back_pipeline())[0]


def test_what_crosses_a_cut() -> None:
    first, second = staged("mlp", StagePlan(NAMES[:2]), StagePlan(NAMES[2:])).stages
    (sent,) = first.send
    assert (sent.name, sent.shape, sent.requires_grad) == ("add", (4, 8, 16), True)
    assert second.receive == first.send
    assert first.receive == () and second.send == ()
    assert first.loss is None and second.loss == "cross_entropy_loss"
    assert first.count is None and second.count is not None and second.count_inputs == ("labels",)


def test_a_value_that_skips_a_stage_travels_through() -> None:
    stages = staged("mlp", *[StagePlan((n,)) for n in NAMES]).stages
    assert [[v.name for v in s.send] for s in stages] == [["embedding"], ["add"], ["add_1"], []]
    assert [s.shared_outputs for s in stages] == [("ids",), (), (), ("view_1",)]


def test_sent_values_have_the_local_shape_of_the_boundary() -> None:
    split = {"add": "shard d1", "linear.1": "shard b1"}
    first, _ = staged(
        "mlp",
        StagePlan(NAMES[:2]),
        StagePlan(NAMES[2:]),
        boundary="S(1)",
        tp=2,
        placements={"layers.0": split},
    ).stages
    assert first.send[0].shape == (4, 4, 16) and str(first.send[0].placement) == "S(1)"


def test_parameters_know_their_stages() -> None:
    stages = staged("tied", StagePlan(NAMES[:2]), StagePlan(NAMES[2:])).stages
    assert stages[0].parameters["embed.weight"].stages == (0, 1)
    assert stages[1].parameters["embed.weight"].stages == (0, 1)
    assert stages[1].parameters["layers.1.up.weight"].stages == (1,)
    assert "layers.0.up.weight" not in stages[1].parameters
    assert stages[1].parameters["layers.1.up.weight"].shape == (64, 16)


def test_batch_inputs_are_described() -> None:
    (stage,) = staged("mlp", StagePlan(NAMES)).stages
    assert {n: v.shape for n, v in stage.batch_inputs.items()} == {"ids": (4, 8), "labels": (4, 8)}
    assert not stage.whole_inputs


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([StagePlan(("embed", "layers.7", "layers.1", "head"))], "unknown block 'layers.7'"),
        (
            [StagePlan(("embed", "layers.0")), StagePlan(("head",))],
            "block 'layers.1' is in no stage",
        ),
        ([StagePlan(("embed", "layers.1", "layers.0", "head"))], "blocks are out of order"),
        ([StagePlan(NAMES), StagePlan(())], "stage 1 is empty"),
        (
            [StagePlan(NAMES[:2], ("head",)), StagePlan(NAMES[2:])],
            "stage 0 recomputes 'head', which it does not hold",
        ),
    ],
)
def test_cuts_that_do_not_fit(stages: list[StagePlan], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        staged("mlp", *stages)


def test_a_tied_parameter_is_placed_the_same_everywhere() -> None:
    placements = {"embed": {"parameter weight": "S(0)", "embedding": "shard v"}}
    with pytest.raises(
        PlanError,
        match=r"'embed.weight' is shared by blocks that place it differently: S\(0\) and R",
    ):
        staged("tied", StagePlan(NAMES), tp=2, placements=placements)


def test_stages_are_visible_in_the_printed_program() -> None:
    text = staged("mlp", StagePlan(NAMES[:2], ("layers.0",)), StagePlan(NAMES[2:])).text()
    assert "autopar.send(add, stage=1)  # [4, 8, 16] torch.float32 R" in text
    assert "add = autopar.recv(stage=0)" in text
    assert "# block layers.0  # recomputed in the backward" in text
