"""Sequences split over ranks: loss and every gradient equal those of one device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest

from autopar.passes.analysis.candidates import Candidates
from autopar.passes.analysis.sequence_candidates import sequence_candidates
from autopar.sequence_shards import ATTENTION
from autopar.workflow import sequence_kinds
from autopar.workflow.verification import Case, Verdict, verify_plans
from tests.end_to_end import models, sequence_models
from tests.end_to_end.plans import Planner
from tests.end_to_end.verdicts import assert_equal
from tests.warm_ranks import run_on_forks, run_planner

Layouts = dict[int, dict[str, str]]

LAYOUTS: Layouts = {
    2: {
        "cp2": "cp=2,tp=1,pp=1,microbatch=1,zero=0",
        "cp2 zero3 recompute": "cp=2,tp=1,pp=1,microbatch=1,zero=3,recompute=full",
        "cp2 two samples": "cp=2,tp=1,pp=1,microbatch=2,zero=1",
    },
    4: {
        "cp4": "cp=4,tp=1,pp=1,microbatch=1,zero=1",
        "cp2 dp2 zero0": "cp=2,tp=1,pp=1,dp=2,microbatch=1,zero=0",
        "cp2 dp2 zero1": "cp=2,tp=1,pp=1,dp=2,microbatch=1,zero=1",
        "cp2 dp2 zero3": "cp=2,tp=1,pp=1,dp=2,microbatch=1,zero=3",
        "cp2 pp2": "cp=2,tp=1,pp=2,microbatch=1,zero=3",
        "cp2 tp2": "cp=2,tp=2,pp=1,microbatch=1,weights=split,zero=0",
        "cp2 tp2 in part": "cp=2,tp=2,pp=1,microbatch=1,weights=split,zero=1",
        "cp2 tp2 sequence-parallel": (
            "cp=2,tp=2,pp=1,microbatch=1,weights=split,boundary=S(1),zero=3,recompute=full"
        ),
    },
}
HEADS: Layouts = {
    2: {"cp2": LAYOUTS[2]["cp2"]},
    4: {n: LAYOUTS[4][n] for n in ("cp2 dp2 zero3", "cp2 tp2 sequence-parallel")},
}
BOTH_SIDES: Layouts = {2: {n: LAYOUTS[2][n] for n in ("cp2", "cp2 zero3 recompute")}}
# Its loss has a term that is no mean over targets: the batch passes whole.
OWN: Layouts = {
    2: {"cp2": "cp=2,tp=1,pp=1,microbatches=1,zero=3"},
    4: {
        "cp2 pp2": "cp=2,tp=1,pp=2,microbatches=1,zero=0",
        "cp2 tp2": "cp=2,tp=2,pp=1,microbatches=1,weights=split,zero=1",
    },
}
RECURRENT: Layouts = {2: {"cp2": LAYOUTS[2]["cp2"]}}


def only(strategy: str) -> Any:
    """A search that may split attention over cp in one way alone."""

    def candidates(*args: Any) -> Candidates:
        found = sequence_candidates(*args)
        for node, call in found.calls.items():
            if call.op_name == ATTENTION:
                found.strategies[node] = [s for s in found.strategies[node] if s.name == strategy]
        return found

    return patch.object(sequence_kinds, "sequence_candidates", candidates)


def _verdicts(text: str, layouts: Layouts, attention: str) -> dict[str, Verdict]:
    """In a planner: capture and search once, then fork the ranks of each world size."""
    planner = Planner.of(text)
    found: dict[str, Verdict] = {}
    for nproc, names in layouts.items():
        with only(attention) if attention else nullcontext():
            plans = [planner.plan(nproc, pins) for pins in names.values()]
        plans = [
            planner.in_part(plan, -1) if "in part" in name else plan
            for name, plan in zip(names, plans, strict=True)
        ]
        for plan in plans:
            split = [s for chosen in plan.cp_placements.values() for s in chosen.values()]
            assert plan.mesh.cp > 1 and (attention or "shard b1") in split
        cases = [
            Case(text, pins, plan=plan.to_dict(), steps=0)
            for pins, plan in zip(names.values(), plans, strict=True)
        ]
        arguments = (text, cases, planner.program)
        by_rank = run_on_forks(verify_plans, nproc, arguments, timeout_seconds=200)
        found.update(zip(names, by_rank[0], strict=True))
    return found


@pytest.mark.parametrize(
    ("model", "layouts", "attention"),
    [
        (f"{models.MODELS}:llama_grouped", LAYOUTS, "shard q"),
        (f"{models.MODELS}:gpt2", HEADS, "shard g"),
        (f"{sequence_models.MODELS}:bert", BOTH_SIDES, "shard q"),
        (f"{sequence_models.MODELS}:own", OWN, ""),
        (f"{sequence_models.MODELS}:recurrent", RECURRENT, ""),
    ],
    ids=["llama, keys gathered", "gpt2, by heads", "bert", "own attention", "recurrent"],
)
def test_every_layout_equals_one_device(model: str, layouts: Layouts, attention: str) -> None:
    verdicts = run_planner(_verdicts, model, layouts, attention)
    assert len(verdicts) == sum(map(len, layouts.values()))
    assert_equal(verdicts)
