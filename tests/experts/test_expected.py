"""Plans priced for a measured load: who is waited for, and what must fit."""

from __future__ import annotations

from functools import lru_cache

import pytest
from torch import nn

from autopar.api import search_program
from autopar.cluster import Cluster
from autopar.errors import UsageError
from autopar.experts.assumed_rows import assumed_rows, imbalance
from autopar.experts.expected import busiest_shares, expect_load, expected_load
from autopar.passes.capture import capture
from autopar.plan_document import Plan
from autopar.program import Program
from tests.passes.expert_toys import library

LAYERS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
CLUSTER = Cluster.parse("h100:1x4")
EVEN = {name: [10, 10, 10, 10] for name in LAYERS}
# Experts 0 and 1 are neighbours: one of two ranks gets all rows, one of four ranks half of them.
SKEWED = {name: [20, 20, 0, 0] for name in LAYERS}


@lru_cache(maxsize=8)
def program(load: str) -> Program:
    model, inputs = library("mixtral")
    if load:
        expect_load(model, {"even": EVEN, "skewed": SKEWED, "one": {LAYERS[0]: [1, 0, 0, 0]}}[load])
    return capture(model, inputs, name="mixtral")


def plan(load: str, pins: str) -> Plan:
    found = search_program(
        program(load), CLUSTER, global_batch_size=64, pins=pins, explain=False
    ).plan
    assert found is not None
    return found


def step(load: str, pins: str) -> float:
    return float(plan(load, pins).predicted["step_seconds"])


@pytest.mark.parametrize("pins", ["ep=2,dp=4,tp=1", "ep=4,dp=4,tp=1"])
def test_ranks_wait_for_the_busiest(pins: str) -> None:
    even, skewed = step("even", pins), step("skewed", pins)
    # Routing by chance is a little worse than even.
    assert even <= step("", pins) <= skewed and even < skewed
    memory = [
        plan(load, f"{pins},recompute=none,microbatch=16").predicted["memory_per_stage"][0]
        for load in ("even", "skewed")
    ]
    assert memory[0]["activations"] < memory[1]["activations"]
    assert memory[0]["parameters"] == memory[1]["parameters"]


def test_experts_that_are_whole_on_a_rank_do_not_care() -> None:
    assert step("even", "ep=1,dp=4,tp=1") == pytest.approx(step("skewed", "ep=1,dp=4,tp=1"))


def test_layers_without_a_load_are_even() -> None:
    """One of two layers is skewed: the time is between."""
    pins = "ep=4,dp=4,tp=1"
    assert step("even", pins) < step("one", pins)


def test_shares_of_ranks() -> None:
    shares = (0.4, 0.1, 0.2, 0.3)
    assert busiest_shares([shares], 2) == [0.5]
    assert busiest_shares([shares, (0.25,) * 4], 4) == [0.4, 0.25]
    assert busiest_shares([shares], 1) == pytest.approx([1.0])


def test_rows_that_come() -> None:
    assert assumed_rows(10) == 10
    with imbalance(1.25):
        assert assumed_rows(10) == 13
    assert assumed_rows(10) == 10


def test_a_model_knows_its_load() -> None:
    model, _ = library("mixtral")
    assert expected_load(model) == {}
    expect_load(model, {LAYERS[1]: [1, 2, 3, 4]})
    assert expected_load(model) == {LAYERS[1]: (0.1, 0.2, 0.3, 0.4)}
    expect_load(model, EVEN)
    assert expected_load(model)[LAYERS[0]] == (0.25,) * 4


@pytest.mark.parametrize(
    ("load", "message"),
    [
        ({"other": [1, 2, 3, 4]}, "the load has layer 'other', the model has not"),
        ({LAYERS[0]: [1, 2, 3]}, "has 3 numbers, there are 4 experts"),
        ({LAYERS[0]: [0, 0, 0, 0]}, "has no rows"),
        ({LAYERS[0]: [1, -2, 3, 4]}, "expert 1 of layer"),
        ({}, "without layers"),
    ],
)
def test_a_load_that_does_not_fit(load: dict[str, list[float]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        expect_load(library("mixtral")[0], load)


def test_a_model_without_experts() -> None:
    with pytest.raises(UsageError, match="its layers with experts are none"):
        expect_load(nn.Linear(2, 2), {"x": [1.0, 2.0]})
