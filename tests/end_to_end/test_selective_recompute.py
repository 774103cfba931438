"""Blocks recomputed in part on real gloo ranks: loss and every gradient equal one device."""

from __future__ import annotations

import pytest

from autopar.workflow.verification import Case, Verdict, verify_plans
from tests.end_to_end.models import MODELS
from tests.end_to_end.plans import Planner
from tests.warm_ranks import run_on_forks, run_planner

LAYOUTS = {
    "tp2": "tp=2,pp=1,dp=1,weights=split",
    "tp2 sequence-parallel": "tp=2,pp=1,dp=1,weights=split,boundary=S(1)",
    "pp2": "tp=1,pp=2,dp=1,microbatches=4",
    "pp2 two chunks": "tp=1,pp=2,dp=1,microbatches=4,chunks=2,schedule=interleaved",
    "dp2 zero0": "tp=1,pp=1,dp=2,zero=0,microbatches=2",
    "dp2 zero2": "tp=1,pp=1,dp=2,zero=2,microbatches=2",
    "dp2 zero3": "tp=1,pp=1,dp=2,zero=3,microbatches=2",
}


def _verdicts(model: str) -> dict[str, Verdict]:
    text = f"{MODELS}:{model}"
    planner = Planner.of(text)
    cases = {}
    for name, pins in LAYOUTS.items():
        plan = planner.plan(2, pins)
        # Cheap ops alone, and all but what nothing needs.
        for corner in (0, -1):
            case = Case(text, pins, plan=planner.in_part(plan, corner).to_dict())
            cases[f"{name} {corner}"] = case
    arguments = (text, list(cases.values()), planner.program)
    by_rank = run_on_forks(verify_plans, 2, arguments, timeout_seconds=200)
    return dict(zip(cases, by_rank[0], strict=True))


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_blocks_recomputed_in_part_equal_one_device(model: str) -> None:
    verdicts = run_planner(_verdicts, model)
    assert len(verdicts) == 2 * len(LAYOUTS)
    for name, verdict in verdicts.items():
        assert verdict.equal, f"{name}: {verdict.error or verdict.worst_error}"
        assert "in part" in verdict.plan
        assert verdict.gradients and verdict.loss_error <= 1e-5 and verdict.worst_error <= 1e-5
