"""ZeRO-3 with every second block kept gathered equals one device: loss, gradients, AdamW steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.plan_document import Plan
from autopar.workflow.verification import Case, Verdict, verify_plans
from tests.end_to_end.expert_models import MODELS as EXPERT_MODELS
from tests.end_to_end.models import MODELS
from tests.end_to_end.plans import Planner
from tests.end_to_end.verdicts import assert_equal
from tests.warm_ranks import run_on_forks, run_planner

LAYOUTS = {
    2: {
        "dp2": "tp=1,pp=1,dp=2,zero=3,microbatches=4",
        "dp2 one micro-batch": "tp=1,pp=1,dp=2,zero=3,microbatches=1,recompute=full",
    },
    4: {
        "dp2 tp2": "tp=2,pp=1,dp=2,zero=3,weights=split,boundary=S(1)",
        "dp2 pp2": "tp=1,pp=2,dp=2,zero=3,microbatches=4,recompute=full",
        "cp2 dp2": "tp=1,pp=1,cp=2,dp=2,zero=3,microbatches=2",
        "dp4 shard2": "tp=1,pp=1,dp=4,shard=2,zero=3,microbatches=2",
    },
}


EXPERTS = {
    4: {
        "dp4 ep2": "tp=1,pp=1,dp=4,ep=2,zero=3,microbatches=2",
        "dp2 tp2 ep2": "tp=2,pp=1,dp=2,ep=2,zero=3,weights=split",
    },
}


def half_kept(plan: Plan) -> Plan:
    stages = tuple(
        replace(s, keep_gathered=s.blocks[i % 2 :: 2]) for i, s in enumerate(plan.stages)
    )
    return replace(plan, stages=stages)


def _verdicts(text: str, layouts: dict[int, dict[str, str]]) -> dict[str, Verdict]:
    planner = Planner.of(text)
    found: dict[str, Verdict] = {}
    for nproc, names in layouts.items():
        plans = [half_kept(planner.plan(nproc, pins)) for pins in names.values()]
        cases = [
            Case(text, pins, plan=plan.to_dict(), steps=3)
            for pins, plan in zip(names.values(), plans, strict=True)
        ]
        by_rank = run_on_forks(
            verify_plans, nproc, (text, cases, planner.program), timeout_seconds=200
        )
        found.update(zip(names, by_rank[0], strict=True))
    return found


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_half_of_the_blocks_kept_equals_one_device(model: str) -> None:
    verdicts = run_planner(_verdicts, f"{MODELS}:{model}", LAYOUTS)
    assert len(verdicts) == 6
    assert_equal(verdicts)
    for verdict in verdicts.values():
        assert verdict.parameter_error < 1e-3


def test_half_of_the_blocks_kept_beside_experts_that_ep_splits() -> None:
    verdicts = run_planner(_verdicts, f"{EXPERT_MODELS}:mixtral", EXPERTS)
    assert len(verdicts) == 2
    assert_equal(verdicts)
