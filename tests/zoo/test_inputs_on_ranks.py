"""Inputs, outputs and state of all kinds on two real ranks: loss, gradients and buffers equal."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopar.program import Program
from autopar.workflow.verification import Case, Verdict, verify_plans
from tests.end_to_end.plans import Planner
from tests.warm_ranks import run_on_forks, run_planner

FOLDER = Path(__file__).parent
TP, PP, ZERO = "tp=2,weights=split,boundary=R", "pp=2", "dp=2,zero=3"
# function -> pins of each plan.
CASES = {
    "nested": (TP, f"{PP},microbatches=2", ZERO),
    "logits_only": (f"{PP},microbatches=2", ZERO),
    "packed": (TP,),
    "batch_norm": (TP, f"{PP},microbatches=1", ZERO),
    "shared": (f"{PP},microbatches=2",),
    "frozen_tied": (f"{PP},microbatches=2", ZERO),
    "bf16": (ZERO,),
    "fp16": (TP, f"{PP},microbatches=2", ZERO),
    "custom_op": (TP, f"{PP},microbatches=2", ZERO),
    "marked_layer": (TP,),
    "marked_tied_embedding": (TP, f"{PP},microbatches=2"),
    "deep_supervision": (f"{PP},microbatches=2",),
    "two_losses": (TP, f"{PP},microbatches=2", ZERO),
    "own_backward": (TP, f"{PP},microbatches=2,recompute=full", ZERO),
    "learned_queries": (TP, f"{PP},microbatches=2", f"{ZERO},microbatches=2"),
    "several_terms": (TP, f"{PP},microbatches=2", f"{ZERO},microbatches=2"),
    "recomputed": (TP, f"{PP},microbatches=2", ZERO),
    "bags": (TP, f"{PP},microbatches=2", ZERO),
}
MARKED = {
    *("custom_op", "marked_layer", "marked_tied_embedding", "deep_supervision", "two_losses"),
    "own_backward",
}
CAPTURED = {"several_terms", "recomputed", "bags"}


def _on_rank(models: list[tuple[str, list[Case], Program]]) -> list[list[Verdict] | None]:
    return [verify_plans(text, cases, program) for text, cases, program in models]


def _verdicts() -> dict[str, list[Verdict]]:
    """In a planner: capture every model once, search its plans, then fork two ranks for all."""
    models = []
    for name, plans in CASES.items():
        text = f"{_file(name)}:{name}"
        planner = Planner.of(text)
        cases = [Case(text, pins, plan=planner.plan(2, pins).to_dict()) for pins in plans]
        models.append((text, cases, planner.program))
    found = run_on_forks(_on_rank, 2, (models,), timeout_seconds=200)[0]
    return dict(zip(CASES, found, strict=True))


@pytest.fixture(scope="module")
def verdicts() -> dict[str, list[Verdict]]:
    return run_planner(_verdicts, timeout_seconds=280)


def _file(name: str) -> Path:
    if name in CAPTURED:
        return FOLDER / "captured_models.py"
    return FOLDER / ("marked_models.py" if name in MARKED else "input_models.py")


@pytest.mark.parametrize("name", CASES)
def test_equal(verdicts: dict[str, list[Verdict]], name: str) -> None:
    for verdict in verdicts[name]:
        where = f"{verdict.plan}: loss {verdict.loss_error}, {verdict.worst} {verdict.worst_error}"
        assert verdict.equal and verdict.gradients, verdict.error or where


def test_frozen_parameters_have_no_gradient(verdicts: dict[str, list[Verdict]]) -> None:
    for verdict in verdicts["frozen_tied"]:
        assert not [n for n in verdict.gradients if n.startswith("model.layers.0.")]
        assert [n for n in verdict.gradients if n.startswith("model.layers.1.")]
        assert "lm_head.weight" not in verdict.gradients
