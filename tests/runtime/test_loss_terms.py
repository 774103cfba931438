"""Auxiliary terms of the loss under every kind of axis: those of one device."""

from __future__ import annotations

import pytest
import torch

from autopar.api import build
from autopar.plan_document import Plan
from autopar.program import Program
from autopar.workflow.verification import build_real
from tests.end_to_end.expert_models import MODELS
from tests.end_to_end.plans import Planner
from tests.warm_ranks import run_on_forks, run_planner

LAYOUTS = {
    "tp=2,dp=1,weights=split": 2,
    "tp=1,dp=2,ep=2,zero=3,recompute=full": 2,
    "tp=1,pp=2,dp=2,ep=2": 4,
    "tp=2,dp=2,weights=split,boundary=S(1)": 4,
}
Told = tuple[float, dict[str, float], dict[str, float]]


def step(text: str, plan: Plan, program: Program) -> Told:
    """The loss and its terms, and the terms before there was a step."""
    model, source = build_real(text, None, 0)
    running = build(model, plan, 8, lambda: program)
    before = running.auxiliary_losses()
    batch = {
        name: torch.cat([value, value.flip(0)]) for name, value in source.example_inputs.items()
    }
    running.step(batch)
    loss = running.step(batch, loss_scale=4.0)
    return float(loss), running.auxiliary_losses(), before


def told(name: str) -> tuple[dict[str, list[Told]], float, float | None]:
    text = f"{MODELS}:{name}"
    planner = Planner.of(text)
    found = {}
    for pins, ranks in LAYOUTS.items():
        plan = planner.plan(ranks, f"microbatches=1,{pins}" if "pp" not in pins else pins)
        arguments = (text, plan, planner.program)
        found[pins] = run_on_forks(step, ranks, arguments, timeout_seconds=200)
    model, source = build_real(text, None, 0)
    given = {
        name: torch.cat([value, value.flip(0)]) for name, value in source.example_inputs.items()
    }
    whole = model(**given)
    auxiliary = getattr(whole, "aux_loss", None)
    return found, float(whole.loss), None if auxiliary is None else float(auxiliary)


def test_equal_to_one_device_on_every_rank() -> None:
    found, loss, auxiliary = run_planner(told, "mixtral_auxiliary_loss")
    assert auxiliary is not None and auxiliary > 0
    for pins, ranks in found.items():
        for rank_loss, terms, before in ranks:
            assert before == {}
            assert list(terms) == ["self.router_aux_loss_coef * aux_loss.to(loss.device)"], pins
            assert rank_loss == pytest.approx(loss, rel=1e-5)
            assert list(terms.values()) == [pytest.approx(0.1 * auxiliary, rel=1e-5)], pins


def test_a_loss_without_such_terms_tells_none() -> None:
    found, loss, auxiliary = run_planner(told, "mixtral")
    assert auxiliary is None
    for ranks in found.values():
        assert all(terms == {} and total == pytest.approx(loss) for total, terms, _ in ranks)
