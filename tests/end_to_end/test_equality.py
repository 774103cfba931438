"""The equality matrix: real gloo ranks against one device, loss, every gradient, and ten AdamW
steps."""

from __future__ import annotations

import pytest

from autopar.workflow.verification import Case, Verdict, verify_plans
from tests.end_to_end.models import MODELS
from tests.end_to_end.plans import Planner
from tests.end_to_end.verdicts import assert_equal
from tests.warm_ranks import run_on_forks, run_planner

ARCHITECTURES = ("llama", "gpt2", "qwen3", "gemma2")

TWO_RANKS = {
    "tp2": "tp=2,pp=1,dp=1,weights=split",
    "tp2 sequence-parallel": "tp=2,pp=1,dp=1,weights=split,boundary=S(1)",
    "pp2": "tp=1,pp=2,dp=1,microbatches=4",
    "pp2 two chunks": "tp=1,pp=2,dp=1,microbatches=4,chunks=2",
    "pp2 zero-bubble": "tp=1,pp=2,dp=1,microbatches=4,chunks=2,schedule=zero-bubble",
    "pp2 zero-bubble one chunk": "tp=1,pp=2,dp=1,microbatches=4,chunks=1,schedule=zero-bubble",
    "pp2 gpipe recompute": "tp=1,pp=2,dp=1,microbatches=4,schedule=gpipe,recompute=full",
    "dp2 zero0": "tp=1,pp=1,dp=2,zero=0,microbatches=2",
    "dp2 zero1": "tp=1,pp=1,dp=2,zero=1,microbatches=2",
    "dp2 zero2": "tp=1,pp=1,dp=2,zero=2,microbatches=2",
    "dp2 zero3": "tp=1,pp=1,dp=2,zero=3,microbatches=2,recompute=full",
}
FOUR_RANKS = {
    "tp4": "tp=4,pp=1,dp=1,weights=split",
    "pp4": "tp=1,pp=4,dp=1,microbatches=4",
    "tp2 pp2": "tp=2,pp=2,dp=1,weights=split,microbatches=2",
    "tp2 pp2 sequence-parallel recompute": (
        "tp=2,pp=2,dp=1,weights=split,boundary=S(1),microbatches=4,recompute=full"
    ),
    "dp2 tp2 zero3": "tp=2,pp=1,dp=2,zero=3,weights=split,boundary=S(1)",
    "dp2 pp2 zero1": "tp=1,pp=2,dp=2,zero=1,microbatches=2",
    "tp2 pp2 two chunks recompute": (
        "tp=2,pp=2,dp=1,weights=split,microbatches=4,chunks=2,recompute=full"
    ),
    "dp2 pp2 two chunks zero1": "tp=1,pp=2,dp=2,zero=1,microbatches=2,chunks=2",
    "dp2 pp2 two chunks zero3": "tp=1,pp=2,dp=2,zero=3,microbatches=4,chunks=2,recompute=full",
    "dp4 shard2 zero1": "tp=1,pp=1,dp=4,shard=2,zero=1,microbatches=2",
    "dp4 shard2 zero2": "tp=1,pp=1,dp=4,shard=2,zero=2,microbatches=2",
    "dp4 shard2 zero3 recompute": ("tp=1,pp=1,dp=4,shard=2,zero=3,microbatches=2,recompute=full"),
    "tp2 pp2 zero-bubble": (
        "tp=2,pp=2,dp=1,weights=split,microbatches=4,chunks=2,schedule=zero-bubble"
    ),
    "tp2 pp2 sequence-parallel zero-bubble": (
        "tp=2,pp=2,dp=1,weights=split,boundary=S(1),microbatches=4,chunks=2,schedule=zero-bubble"
    ),
    "dp2 pp2 zero-bubble zero0": (
        "tp=1,pp=2,dp=2,zero=0,microbatches=4,chunks=2,schedule=zero-bubble"
    ),
    "dp2 pp2 zero-bubble zero1": (
        "tp=1,pp=2,dp=2,zero=1,microbatches=2,chunks=3,schedule=zero-bubble"
    ),
    "dp2 pp2 zero-bubble one chunk zero1": (
        "tp=1,pp=2,dp=2,zero=1,microbatches=2,chunks=1,schedule=zero-bubble"
    ),
    "dp2 pp2 zero3 recompute": "tp=1,pp=2,dp=2,zero=3,microbatches=2,recompute=full",
}


def _verdicts(text: str, layouts: dict[int, dict[str, str]], steps: int) -> dict[str, Verdict]:
    """In a planner: capture and search once, then fork the ranks of each world size."""
    planner = Planner.of(text)
    found: dict[str, Verdict] = {}
    for nproc, names in layouts.items():
        plans = [planner.plan(nproc, pins) for pins in names.values()]
        cases = [
            Case(text, pins, plan=plan.to_dict(), steps=steps)
            for pins, plan in zip(names.values(), plans, strict=True)
        ]
        arguments = (text, cases, planner.program)
        by_rank = run_on_forks(verify_plans, nproc, arguments, timeout_seconds=200)
        found.update(zip(names, by_rank[0], strict=True))
    return found


def _run(model: str, layouts: dict[int, dict[str, str]], steps: int = 0) -> dict[str, Verdict]:
    return run_planner(_verdicts, f"{MODELS}:{model}", layouts, steps)


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_every_layout_equals_one_device(model: str) -> None:
    verdicts = _run(model, {2: TWO_RANKS, 4: FOUR_RANKS})
    assert len(verdicts) == 29
    assert_equal(verdicts)


def test_hybrid_shards_beside_other_axes_equal_one_device() -> None:
    layouts = {
        "tp2": "tp=2,pp=1,dp=4,shard=2,zero=3,microbatches=2,weights=split,boundary=S(1)",
        "pp2": "tp=1,pp=2,dp=4,shard=2,zero=1,microbatches=2",
        "pp2 two chunks": "tp=1,pp=2,dp=4,shard=2,zero=3,microbatches=2,chunks=2",
        "cp2": "tp=1,pp=1,cp=2,dp=4,shard=4,zero=3,microbatches=2,recompute=full",
        "cp2 apart": "tp=1,pp=1,cp=2,dp=4,shard=2,zero=2,microbatches=2",
    }
    verdicts = _run("gpt2", {8: layouts}, steps=3)
    assert_equal(verdicts)
    for verdict in verdicts.values():
        assert verdict.parameter_error < 1e-3


def test_replicas_outside_stages_equal_one_device() -> None:
    order = "order=tp-cp-pp-dp"
    four = {
        "zero1": f"{order},tp=1,pp=2,dp=2,zero=1,microbatches=2",
        "zero3": f"{order},tp=1,pp=2,dp=2,zero=3,microbatches=2,recompute=full",
        "two chunks": f"{order},tp=1,pp=2,dp=2,zero=0,microbatches=2,chunks=2",
    }
    eight = {
        "tp2": f"{order},tp=2,pp=2,dp=2,zero=3,microbatches=2,weights=split,boundary=S(1)",
        "shard2": f"{order},tp=1,pp=2,dp=4,shard=2,zero=2,microbatches=2",
    }
    verdicts = _run("gpt2", {4: four, 8: eight}, steps=3)
    assert_equal(verdicts)
    for verdict in verdicts.values():
        assert verdict.parameter_error < 1e-3


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_a_v_over_the_ranks_equals_one_device(architecture: str) -> None:
    """Of models whose head has its own weights: both ends of the chain are on the first rank."""
    two = {"pp2": "tp=1,pp=2,dp=1,microbatches=4,schedule=zbv"}
    four = {
        "tp2 sequence-parallel": (
            "tp=2,pp=2,dp=1,weights=split,boundary=S(1),microbatches=2,schedule=zbv"
        ),
        "zero0": "tp=1,pp=2,dp=2,zero=0,microbatches=4,schedule=zbv",
        "zero1": "tp=1,pp=2,dp=2,zero=1,microbatches=2,schedule=zbv",
    }
    assert_equal(_run(architecture, {2: two, 4: four}, steps=3))


@pytest.mark.parametrize("model", ["shared_projections", "stopped_gradient"])
def test_divided_backwards_of_odd_models_equal_one_device(model: str) -> None:
    """Weights that several ops share with others; a gradient that ends where the V turns."""
    pins = "tp=1,pp=2,dp=1,microbatches=4,schedule="
    layouts = {name: pins + name for name in ("zbv", "zero-bubble,chunks=1", "zero-bubble")}
    assert_equal(_run(model, {2: layouts}))


def test_ten_adamw_steps_stay_together() -> None:
    names = ("tp2 pp2", "dp2 tp2 zero3", "dp2 pp2 zero1", "dp2 pp2 zero-bubble zero1")
    verdicts = _run("gpt2", {4: {n: FOUR_RANKS[n] for n in names}}, steps=10)
    assert_equal(verdicts)
    for verdict in verdicts.values():
        assert len(verdict.step_losses) == 10
        assert verdict.step_losses[-1] < verdict.step_losses[0]
        assert verdict.parameter_error < 1e-3


def test_heads_that_tp_does_not_divide() -> None:
    """Three heads on two ranks: attention is not split by heads; the rest is, and it is equal."""
    assert_equal(_run("llama_three_heads", {2: {"tp2": TWO_RANKS["tp2"]}}))


def test_grouped_heads_fewer_than_tp() -> None:
    assert_equal(_run("llama_grouped", {4: {"tp4": FOUR_RANKS["tp4"]}}))
