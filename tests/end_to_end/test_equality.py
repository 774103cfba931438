"""The equality matrix: real gloo ranks against one device, loss, every gradient, and ten AdamW
steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.runtime.launch import spawn
from autopar.workflow.verification import Case, Verdict, verify_plans
from tests.end_to_end.plans import search_plans

MODELS = Path(__file__).parent / "models.py"
ARCHITECTURES = ("llama", "gpt2", "qwen3", "gemma2")

TWO_RANKS = {
    "tp2": "tp=2,pp=1,dp=1,weights=split",
    "tp2 sequence-parallel": "tp=2,pp=1,dp=1,weights=split,boundary=S(1)",
    "pp2": "tp=1,pp=2,dp=1,microbatches=4",
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
    "dp2 pp2 zero3 recompute": "tp=1,pp=2,dp=2,zero=3,microbatches=2,recompute=full",
}


def _run(names: dict[str, str], nproc: int, model: str, steps: int) -> dict[str, Verdict]:
    """Search here, execute there: one capture for all searches, one on every rank."""
    text = f"{MODELS}:{model}"
    cases = [
        Case(text, pins, plan=plan.to_dict(), steps=steps)
        for pins, plan in zip(
            names.values(), search_plans(text, nproc, list(names.values())), strict=True
        )
    ]
    found = spawn(verify_plans, nproc, (text, cases), timeout_seconds=280)[0]
    return dict(zip(names, found, strict=True))


def _check(verdicts: dict[str, Verdict]) -> None:
    failed = [
        f"{name}: {v.error or f'loss {v.loss_error:.2g}, {v.worst} {v.worst_error:.2g} ({v.plan})'}"
        for name, v in verdicts.items()
        if not v.equal
    ]
    assert not failed, "\n".join(failed)
    for verdict in verdicts.values():
        assert verdict.gradients and verdict.loss_error <= 1e-5 and verdict.worst_error <= 1e-5


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_two_ranks_equal_one_device(model: str) -> None:
    _check(_run(TWO_RANKS, 2, model, steps=0))


@pytest.mark.parametrize("model", ARCHITECTURES)
def test_four_ranks_equal_one_device(model: str) -> None:
    _check(_run(FOUR_RANKS, 4, model, steps=0))


def test_ten_adamw_steps_stay_together() -> None:
    names = {
        "tp2 pp2": FOUR_RANKS["tp2 pp2"],
        "dp2 tp2 zero3": FOUR_RANKS["dp2 tp2 zero3"],
        "dp2 pp2 zero1": FOUR_RANKS["dp2 pp2 zero1"],
    }
    verdicts = _run(names, 4, "gpt2", steps=10)
    _check(verdicts)
    for verdict in verdicts.values():
        assert len(verdict.step_losses) == 10
        assert verdict.step_losses[-1] < verdict.step_losses[0]
        assert verdict.parameter_error < 1e-3


def test_heads_that_tp_does_not_divide() -> None:
    """Three heads on two ranks: attention is not split by heads; the rest is, and it is equal."""
    verdicts = _run({"tp2": TWO_RANKS["tp2"]}, 2, "llama_three_heads", steps=0)
    _check(verdicts)


def test_grouped_heads_fewer_than_tp() -> None:
    verdicts = _run({"tp4": FOUR_RANKS["tp4"]}, 4, "llama_grouped", steps=0)
    _check(verdicts)
