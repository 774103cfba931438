"""The formulas of the memory terms add up to the terms, and say what they seem to say."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import sympy
import torch

from autopar.api import search_program
from autopar.cluster import Cluster
from autopar.passes.capture import capture
from autopar.plan_document import Plan
from autopar.workflow.outcome import Outcome
from tests.workflow.test_activation_formula import LENGTH, Gpt

LAYERS = 8


@cache
def planned(pins: str, optimizer: str = "adamw", frozen: bool = False) -> Outcome:
    ids = torch.empty(2, LENGTH // 16, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = Gpt(LAYERS)
    if frozen:
        for parameter in list(model.parameters())[:-2]:
            parameter.requires_grad_(False)
    program = capture(model, {"ids": ids, "labels": ids}, name="gpt", dtype=torch.float32)
    cluster = Cluster.parse("h100:1x4")
    pins, _, precision = pins.partition(",precision=")
    outcome = search_program(
        *(program, cluster),
        global_batch_size=16,
        pins=pins,
        precision=precision or "fp32",
        optimizer=optimizer,
        memory_limit="80GiB",
        explain=True,
    )
    assert outcome.plan is not None
    return outcome


def formulas_of(plan: Plan) -> dict[str, Any]:
    return dict(plan.predicted["memory_formulas"])


SINGLE = [
    "pp=1,dp=4,tp=1,zero=0",
    "pp=1,dp=4,tp=1,zero=1,microbatch=1",
    "pp=1,dp=4,tp=1,zero=1,microbatch=4",
    "pp=1,dp=4,tp=1,zero=2,microbatch=2",
    "pp=1,dp=4,tp=1,zero=3,microbatch=2",
    "pp=1,dp=4,tp=1,zero=3,microbatch=2,precision=bf16-mixed",
    "pp=1,dp=4,tp=1,zero=3,shard=2,microbatch=1,recompute=full",
    "pp=1,dp=1,tp=4,microbatch=4,precision=bf16",
]
PIPELINES = [
    "pp=4,dp=1,tp=1,schedule=1f1b,microbatch=2,recompute=none",
    "pp=2,dp=2,tp=1,schedule=gpipe,microbatch=2,recompute=full,precision=bf16-mixed",
    "pp=2,dp=2,tp=1,schedule=interleaved,chunks=2,microbatch=1,zero=1",
    "pp=2,dp=2,tp=1,schedule=interleaved,chunks=2,microbatch=1,recompute=selective",
    "pp=2,dp=2,tp=1,schedule=zero-bubble,chunks=2,microbatch=1,precision=bf16-mixed",
    "pp=2,dp=2,tp=1,schedule=zbv,microbatch=1,recompute=none",
]


@pytest.mark.parametrize("pins", [*SINGLE, *PIPELINES])
def test_the_parts_add_up_to_the_terms_of_the_fullest_rank(pins: str) -> None:
    plan = planned(pins).plan
    assert plan is not None
    told, ranks = formulas_of(plan), plan.predicted["memory_per_stage"]
    assert ranks[told["rank"]]["total"] == max(rank["total"] for rank in ranks)
    for term, parts in told["terms"].items():
        assert sum(part["bytes"] for part in parts) == ranks[told["rank"]][term], (term, parts)
    assert len(told["live"]) in (0, plan.chunks)


@pytest.mark.parametrize("pins", [*SINGLE, *PIPELINES])
def test_a_formula_gives_its_bytes(pins: str) -> None:
    """But for padding: a block's share of its parameters is rounded up."""
    plan = planned(pins).plan
    assert plan is not None
    told = formulas_of(plan)
    values, found = told["values"], 0
    for parts in told["terms"].values():
        for part in parts:
            formula = re.match(r"\d·\S+", part["text"])
            if formula is None:
                continue
            found += 1
            given = sympy.sympify(formula[0].replace("·", "*")).subs(values)
            assert 0 <= part["bytes"] - given <= 12 * (LAYERS + 2), part
    assert found >= 3, told
    assert all(value > 0 for value in values.values())


@pytest.mark.parametrize("pins", PIPELINES)
def test_what_is_alive_is_what_is_kept(pins: str) -> None:
    """Of the micro-batches alive every block of the rank keeps something."""
    outcome = planned(pins)
    plan, choice = outcome.plan, outcome.result.choice
    assert plan is not None and choice is not None
    told = formulas_of(plan)
    if not told["live"]:  # the end of the step
        assert not told["terms"]["activations"]
        return
    keeping = {b.name for b in choice.chain.blocks if b.least_kept}
    held = [keeping & set(plan.stages[i].blocks) for i in plan.stage_indexes(told["rank"])]
    expected = sum(n * len(some) for n, some in zip(told["live"], held, strict=True))
    counted = [re.match(r"(\d+) × ", part["text"]) for part in told["terms"]["activations"]]
    assert sum(int(found[1]) for found in counted if found) == expected
    assert max(told["live"]) <= plan.microbatches


def test_letters_tell_frozen_parameters_apart() -> None:
    plan = planned("pp=1,dp=4,tp=1,zero=1,microbatch=1", frozen=True).plan
    assert plan is not None
    told = formulas_of(plan)
    assert 0 < told["values"]["t"] < told["values"]["n"]
    assert "t" in told["terms"]["optimizer"][0]["text"]


@pytest.mark.parametrize("optimizer", ["sgd", "sgd-momentum", "adafactor", "adamw-8bit"])
def test_states_of_other_optimizers(optimizer: str) -> None:
    plan = planned("pp=1,dp=4,tp=1,zero=1,microbatch=1", optimizer).plan
    assert plan is not None
    told, (rank,) = formulas_of(plan), plan.predicted["memory_per_stage"]
    parts = told["terms"].get("optimizer", [])
    assert sum(part["bytes"] for part in parts) == rank["optimizer"]
    assert bool(parts) == (optimizer != "sgd")
    assert all(optimizer in p["text"] or optimizer == "sgd-momentum" for p in parts)
