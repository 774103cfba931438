"""Experts on real gloo ranks against one device: loss and every gradient, under each way to split
them."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.workflow.verification import Case, Verdict, verify_plans
from tests.end_to_end.expert_models import MODELS
from tests.end_to_end.plans import Planner, split_experts_only
from tests.end_to_end.verdicts import assert_equal
from tests.warm_ranks import run_on_forks, run_planner

TP = "pp=1,dp=1,weights=split"


def slow(model: str) -> Any:
    return pytest.param(model, marks=pytest.mark.slow)


Found = dict[str, tuple[Verdict, set[str]]]


def _verdicts(text: str, layouts: dict[int, tuple[str, ...]], factor: str) -> Found:
    """In a planner: search with one way to split the experts alone, and run the plans."""
    split_experts_only(factor)
    planner = Planner.of(text)
    found: Found = {}
    for nproc, pins in layouts.items():
        plans = [planner.plan(nproc, p) for p in pins]
        cases = [Case(text, p, plan=plan.to_dict()) for p, plan in zip(pins, plans, strict=True)]
        arguments = (text, cases, planner.program)
        by_rank = run_on_forks(verify_plans, nproc, arguments, timeout_seconds=200)
        for p, plan, verdict in zip(pins, plans, by_rank[0], strict=True):
            chosen = {
                strategy
                for block in plan.placements.values()
                for op, strategy in block.items()
                if op.startswith("experts")
            }
            found[p] = verdict, chosen
    return found


def _check(model: str, layouts: dict[int, tuple[str, ...]], factor: str = "e") -> None:
    found = run_planner(_verdicts, f"{MODELS}:{model}", layouts, factor)
    assert_equal({pins: verdict for pins, (verdict, _) in found.items()})
    for pins, (_, chosen) in found.items():
        if "tp=1" not in pins:
            assert chosen == {f"shard {factor}"}, (pins, chosen)


@pytest.mark.parametrize("model", ["mixtral", slow("gpt_oss"), slow("deepseek_v3")])
def test_expert_parallel_equals_one_device(model: str) -> None:
    two = (f"tp=2,{TP}",)
    four = (
        f"tp=4,{TP}",
        "tp=2,pp=2,dp=1,weights=split,microbatches=2",
        "tp=2,pp=1,dp=2,weights=split,zero=1,microbatches=2",
        "tp=2,pp=1,dp=2,weights=split,zero=3",
    )
    _check(model, {2: two, 4: four})


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3_moe", "olmoe"])
def test_other_families_are_equal_too(model: str) -> None:
    _check(model, {2: (f"tp=2,{TP}",), 4: (f"tp=4,{TP}", "tp=2,pp=1,dp=2,weights=split,zero=3")})


@pytest.mark.parametrize("model", ["mixtral", slow("gpt_oss")])
@pytest.mark.parametrize("factor", ["i", "t"])
def test_other_ways_to_split_are_equal(model: str, factor: str) -> None:
    pins = TP if factor == "i" else TP.removesuffix(",weights=split")
    _check(model, {2: (f"tp=2,{pins}",)}, factor)


@pytest.mark.parametrize(
    "model", ["mixtral", slow("gpt_oss"), slow("mixtral_idle_expert"), slow("qwen2_moe")]
)
def test_all_to_all_equals_one_device(model: str) -> None:
    four = (
        f"tp=4,{TP}",
        f"tp=4,{TP},boundary=S(1),recompute=full",
        "tp=2,pp=2,dp=1,weights=split,microbatches=2",
        "tp=2,pp=1,dp=2,weights=split,zero=3",
    )
    _check(model, {2: (f"tp=2,{TP}",), 4: four}, "t,e")


@pytest.mark.parametrize(
    "model",
    [
        slow("mixtral_top1"),
        slow("mixtral_top4"),
        "mixtral_auxiliary_loss",
        "mixtral_idle_expert",
    ],
)
def test_routings_and_losses(model: str) -> None:
    _check(model, {4: (f"tp=4,{TP}",)})


OVER_REPLICAS = (
    "pp=1,tp=1,dp=4,ep=4,zero=0",
    "pp=1,tp=1,dp=4,ep=2,zero=1,microbatches=2",
    "pp=1,tp=1,dp=4,ep=4,zero=3,recompute=full",
    "pp=1,tp=2,dp=2,ep=2,zero=3,weights=split",
    "pp=2,tp=1,dp=2,ep=2,zero=2,microbatches=2",
    "pp=1,tp=1,dp=2,cp=2,ep=4,zero=3",
)


@pytest.mark.parametrize(
    "model",
    ["mixtral", "qwen2_moe", slow("mixtral_idle_expert"), slow("mixtral_top1"), slow("gpt_oss")]
    + [slow("qwen3_moe"), slow("olmoe"), slow("deepseek_v3")]
    + [slow("llama4_text"), slow("llama4_text_top2")],
)
def test_experts_split_by_replicas_equal_one_device(model: str) -> None:
    """The ranks of dp and cp split them; where tp is more than 1, it splits each expert too."""
    _check_replicas(model, OVER_REPLICAS)


HYBRID = (
    "pp=1,tp=1,dp=4,ep=2,zero=1,shard=2,microbatches=2",
    "pp=1,tp=1,dp=4,ep=4,zero=2,shard=2,microbatches=2",
    "pp=1,tp=1,dp=4,ep=2,zero=3,shard=2,recompute=full",
)


@pytest.mark.parametrize("model", [slow("mixtral"), "qwen2_moe"])
def test_all_else_may_be_sharded_within_groups(model: str) -> None:
    """Hybrid sharding: experts are sharded over all ranks that hold them."""
    found = run_planner(_verdicts, f"{MODELS}:{model}", {4: HYBRID}, "i")
    assert_equal({p: verdict for p, (verdict, _) in found.items()})
    for p, (verdict, _) in found.items():
        assert f"ep{p.split('ep=')[1][0]} shard2" in verdict.plan, verdict.plan


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["deepseek_v2", "ernie4_5_moe", "glm4_moe", "granitemoe", "minimax", "jamba", "phimoe"]
)
def test_more_families(model: str) -> None:
    pins = "pp=1,tp=1,dp=4,ep=4,zero=1", "pp=1,tp=2,dp=2,ep=2,zero=3,weights=split"
    _check_replicas(model, pins)


@pytest.mark.parametrize("model", ["mixtral_auxiliary_loss", slow("qwen3_moe_auxiliary_loss")])
def test_a_loss_that_balances_experts_is_of_the_whole_batch(model: str) -> None:
    """Its means are summed over dp; all samples are one micro-batch."""
    pins = (
        "pp=1,tp=1,dp=4,ep=2,zero=1",
        "pp=1,tp=1,dp=4,ep=4,zero=3,recompute=full",
        "pp=1,tp=2,dp=2,ep=2,zero=0,weights=split",
        "pp=2,tp=1,dp=2,ep=2,zero=2",
    )
    _check_replicas(model, pins)


def _in_part(text: str) -> dict[str, Verdict]:
    planner = Planner.of(text)
    found = {}
    for nproc, pins in ((2, "pp=1,tp=1,dp=2,ep=2"), (4, "pp=1,tp=1,dp=4,ep=4,zero=3")):
        plan = planner.plan(nproc, pins)
        # Cheap ops alone; and all but what nothing needs, the exchange among them.
        parts = [planner.in_part(plan, corner) for corner in (0, -1)]
        assert "exchanged_experts" in {o for s in parts[1].reruns.values() for o in s["set"]}
        cases = [Case(text, pins, plan=part.to_dict()) for part in parts]
        arguments = (text, cases, planner.program)
        by_rank = run_on_forks(verify_plans, nproc, arguments, timeout_seconds=200)
        found |= {f"{pins} {i}": verdict for i, verdict in enumerate(by_rank[0])}
    return found


@pytest.mark.parametrize("model", ["qwen2_moe", slow("deepseek_v3"), slow("mixtral")])
def test_exchanges_beside_shared_experts_run_again(model: str) -> None:
    assert_equal(run_planner(_in_part, f"{MODELS}:{model}"))


def test_a_limit_that_no_expert_reaches_changes_nothing() -> None:
    _check_replicas("mixtral_limited", ("pp=1,tp=1,dp=4,ep=2,zero=3", "pp=1,tp=1,dp=2,cp=2,ep=4"))


def _check_replicas(model: str, pins: tuple[str, ...]) -> None:
    found = run_planner(_verdicts, f"{MODELS}:{model}", {4: pins}, "i")
    assert_equal({p: verdict for p, (verdict, _) in found.items()})
    for p, (verdict, _) in found.items():
        assert f"ep{p.split('ep=')[1][0]}" in verdict.plan, verdict.plan
