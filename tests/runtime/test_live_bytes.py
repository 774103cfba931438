"""What is alive at the fullest moment of a toy's step, against what can be counted by hand."""

from __future__ import annotations

from typing import Any

import torch

from autopar.mesh import Mesh
from autopar.plan_document import Plan
from autopar.runtime import collectives  # noqa: F401 - registers the ops
from autopar.runtime.dry_run import dry_run
from autopar.runtime.live_bytes import RESOLUTION, TIE, Peak
from autopar.runtime.program import DistributedProgram
from autopar.runtime.ranks import Ranks
from autopar.workflow.dry_memory import measured_step
from tests.runtime.toy import SEQUENCE, WIDTH, make_model, make_plan, make_stages

ITEM = 4


def measured(plan: Plan, rank: int = 0) -> tuple[Peak, int]:
    """The peak of this rank's second step, and the elements of its shards of parameters."""
    with dry_run(rank, plan.mesh.size) as shapes_only:
        ranks = Ranks.create(plan.mesh)
        stages = make_stages(plan, ranks.group("tp").group_name, dtype=torch.float32)
        model = make_model(dtype=torch.float32)
        with shapes_only:
            program = DistributedProgram(stages, plan, ranks, model)
            parameters: list[Any] = [p for _, p in program.named_parameters()]
            peak = measured_step(program)
            assert "_run" not in vars(program._engines[0].stage.blocks[0])
            return peak, sum(p.to_local().numel() for p in parameters)


def test_states_of_one_rank() -> None:
    peak, count = measured(make_plan(Mesh(), microbatches=2))
    steps = 4 * 26  # AdamW counts the steps of each parameter in a float32
    assert peak.terms["parameters"] == count * ITEM
    assert peak.terms["gradients"] == count * ITEM
    assert peak.terms["optimizer"] == 2 * count * ITEM + steps
    assert peak.total == sum(peak.terms.values())


def test_activations_grow_with_the_micro_batch_and_not_with_their_number() -> None:
    small, _ = measured(make_plan(Mesh(), microbatch=32))
    large, _ = measured(make_plan(Mesh(), microbatch=64))
    more, _ = measured(make_plan(Mesh(), microbatch=64, microbatches=5))
    assert "ward" in small.moment
    assert 1.9 < large.terms["activations"] / small.terms["activations"] < 2.1
    assert more.terms["activations"] == large.terms["activations"]


def test_the_last_stage_lets_go_of_each_micro_batch() -> None:
    few, _ = measured(make_plan(Mesh(pp=2), microbatch=64, microbatches=4), rank=1)
    many, _ = measured(make_plan(Mesh(pp=2), microbatch=64, microbatches=12), rank=1)
    received = 64 * SEQUENCE * WIDTH * ITEM
    assert many.terms["activations"] - few.terms["activations"] < received


def test_the_first_stage_holds_one_micro_batch_for_each_stage() -> None:
    first, _ = measured(make_plan(Mesh(pp=2), microbatch=64, microbatches=6), rank=0)
    both, _ = measured(
        make_plan(Mesh(pp=2), microbatch=64, microbatches=6, schedule="gpipe"), rank=0
    )
    assert 2.5 < both.terms["activations"] / first.terms["activations"] < 3.5


def test_sharded_states() -> None:
    whole, count = measured(make_plan(Mesh(), microbatches=2))
    sharded, mine = measured(make_plan(Mesh(dp=4), zero=3, microbatches=2))
    assert 4 * mine >= count and sharded.terms["parameters"] < whole.terms["parameters"]
    assert sharded.terms["gradients"] <= mine * ITEM
    assert 2 * mine * ITEM <= sharded.terms["optimizer"] < 0.3 * whole.terms["optimizer"]


def test_recomputation_keeps_inputs_only() -> None:
    kept, _ = measured(make_plan(Mesh(), microbatch=64))
    again, _ = measured(make_plan(Mesh(), microbatch=64, recompute=True))
    assert again.terms["activations"] < 0.6 * kept.terms["activations"]


def test_moments_that_are_as_full_are_told() -> None:
    """Each with its own terms, and the nearest of them to what was predicted."""
    peak, _ = measured(make_plan(Mesh(), microbatches=2))
    assert peak.terms in peak.tied
    for terms in peak.tied:
        assert (1 - TIE) * peak.total <= sum(terms.values()) <= (1 + RESOLUTION) * peak.total
    one = Peak({**peak.terms, "buffers": 0}, "", ({**peak.terms, "buffers": 7, "gradients": 3},))
    near = {**peak.terms, "buffers": 6, "gradients": 3}
    assert one.nearest(near) == one.tied[0]
    assert one.nearest(one.terms) == one.terms
