"""A batch norm and the statistics that it keeps become ops over dp; nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import FileCheck

import autopar
from autopar.api import prepared, rewrite_for
from autopar.errors import PlanError, UsageError
from autopar.plan_check import check_plan
from autopar.stage_program import StageProgram


class Model(nn.Module):
    def __init__(self, first: bool = False) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(4) if first else nn.Identity()
        self.layer = nn.Linear(4, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.layer(self.first(x)))
        loss: Tensor = (h * h.detach().mean(1, keepdim=True)).square().mean()
        return loss


INPUTS = {"x": torch.randn(8, 4)}


def stage(pins: str, model: nn.Module | None = None) -> StageProgram:
    model = model or Model()
    plan = autopar.plan(
        model, "cpu:2", example_inputs=INPUTS, global_batch_size=8, pins=pins + ",microbatches=1"
    )
    (made,) = rewrite_for(prepared(model, INPUTS, plan), plan).stages
    return made


def code(made: StageProgram) -> str:
    graphs = [b.graph for b in made.blocks] + ([made.shared] if made.shared is not None else [])
    return "\n".join(g.code for g in graphs)


def test_statistics_are_summed_over_dp() -> None:
    text = code(stage("dp=2"))
    FileCheck().check("batch_mean.default(detach").check_same("[0], 2, 'dp')").check(
        "batch_variance.default(detach"
    ).check_same("[0], 2, 'dp')").check("lerp").check(
        "autopar.batch_norm.default(linear"
    ).check_same("1e-05, 2, 'dp')").check("aten.mean.dim").run(text)
    assert "aten.batch_norm" not in text and text.count("aten.mean.dim") == 1


class Balanced(nn.Module):
    """A loss for the load of four classes, as mixtures of experts add one."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        chosen = nn.functional.one_hot(h.argmax(-1), 4).float()
        if self.counts:
            load, share = chosen.sum(0).square(), h.softmax(-1).sum(0)
        else:
            load, share = chosen.mean(0), torch.cat([h, h * 2]).softmax(-1).mean(0)
        loss: Tensor = h.square().mean() + 0.1 * (load * share).sum()
        return loss


def test_the_load_of_the_whole_batch() -> None:
    text = code(stage("dp=2", Balanced()))
    FileCheck().check("mean.dim(").check("autopar.batch_average.default(mean").check_same(
        ", 2, 'dp')"
    ).run(text)
    # What was chosen has no gradient: it is like what a batch norm keeps.
    assert text.count("autopar.batch_average") == text.count("autopar.batch_mean") == 1
    assert "batch_total" not in text


def test_counts_of_the_whole_batch() -> None:
    text = code(stage("dp=2", Balanced(counts=True)))
    assert text.count("autopar.batch_total.default(sum") == 2 and "batch_average" not in text


def test_a_norm_of_the_inputs_too() -> None:
    """Its statistics need no parameter: stages share them."""
    text = code(stage("dp=2", Model(first=True)))
    assert text.count("autopar.batch_norm") == 2
    assert text.count("autopar.batch_mean") == text.count("autopar.batch_variance") == 2


def test_one_dp_rank_needs_no_sum() -> None:
    text = code(stage("tp=2"))
    assert "autopar.batch" not in text and "aten.batch_norm" in text


def test_micro_batches_are_refused_with_the_norm() -> None:
    model = Model()
    with pytest.raises(UsageError, match="microbatches=2, but the batch norm 'norm' takes"):
        autopar.plan(
            model, "cpu:2", example_inputs=INPUTS, global_batch_size=8, pins="microbatches=2"
        )
    plan = autopar.plan(model, "cpu:2", example_inputs=INPUTS, global_batch_size=8, pins="dp=2")
    assert plan.microbatches == 1 and any("dp ranks sum" in note for note in plan.notes)
    edited = {**plan.to_dict(), "microbatches": 2, "microbatch": 2}
    edited["sizes"] = {**edited["sizes"], "batch": 2}
    assert autopar.Plan.from_dict(edited).microbatches == 2
    with pytest.raises(PlanError, match="microbatches is 2, but the batch norm 'norm'"):
        check_plan(autopar.Plan.from_dict(edited), prepared(model, INPUTS, plan))
