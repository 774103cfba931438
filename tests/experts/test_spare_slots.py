"""Room on every rank for more experts than its part: which parameters have it, and what refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import autopar.runtime.collectives  # noqa: F401 - registers the ops
from autopar.api import rewrite_for, search_program
from autopar.cluster import Cluster
from autopar.errors import PlanError, UsageError
from autopar.experts.spare_slots import spare_holders
from autopar.plan_document import Plan
from autopar.program import Program
from autopar.report.text import decision_rows
from tests.workflow.on_paper import planned, prepared


@pytest.fixture(scope="module")
def mixtral() -> Program:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=4,
        max_position_embeddings=16,
        use_cache=False,
    )
    return prepared(lambda: MixtralForCausalLM(config), 4, 8, "mixtral")[1]


@pytest.fixture(scope="module")
def llama() -> Program:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1)
    return prepared(lambda: LlamaForCausalLM(config), 4, 8, "llama")[1]


def test_parameters_of_split_experts_alone(mixtral: Program) -> None:
    plan = planned(mixtral, 4, 16, "dp=4,ep=2,zero=0", spare_experts=3)
    stage = rewrite_for(mixtral, plan).stages[0]
    roomy = {name for name, spec in stage.parameters.items() if spec.spare}
    of_experts = {name for name in stage.parameters if ".experts." in name}
    assert roomy == of_experts and len(roomy) == 2 * 3
    assert {spec.spare for spec in stage.parameters.values()} == {0, 3}
    # The model's shape is what it was: slots are the runtime's.
    assert all(stage.parameters[name].shape[0] == 4 for name in roomy)
    for block in stage.blocks:
        assert set(block.spare) == roomy & set(block.parameters)
        graph = block.graph.graph
        assert len(spare_holders(block.graph)) == len(block.spare)
        held = spare_holders(block.graph, set(graph.find_nodes(op="placeholder")))
        assert not held  # of what other blocks read too, none


def test_experts_that_are_not_split_have_none(mixtral: Program) -> None:
    plan = planned(mixtral, 4, 16, "dp=4,ep=1,zero=0", spare_experts=3)
    stage = rewrite_for(mixtral, plan).stages[0]
    assert not any(spec.spare for spec in stage.parameters.values())
    assert not any(block.spare for block in stage.blocks)


def test_a_plan_keeps_it(mixtral: Program, tmp_path: Path) -> None:
    plan = planned(mixtral, 4, 16, "dp=4,ep=4,zero=1", spare_experts=2)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan and plan.spare_experts == 2
    assert plan.decisions()["spare_experts"] == 2
    assert ("spare slots", "2 on each rank, where ranks split a layer's experts") in decision_rows(
        plan
    )
    none = planned(mixtral, 4, 16, "dp=4,ep=4,zero=1")
    assert "spare_experts" not in none.to_dict() and none.spare_experts == 0
    assert not any(name == "spare slots" for name, _ in decision_rows(none))


@pytest.mark.parametrize("pins", ["dp=4,ep=4,zero=0", "dp=4,ep=2,zero=1", "dp=4,ep=2,zero=3"])
def test_it_is_priced(mixtral: Program, pins: str) -> None:
    """Parameters, gradients and states of 2 slots, each of three matrices of 32 x 48 in float32."""
    pins = f"{pins},microbatches=1"
    memory = [
        planned(mixtral, 4, 16, pins, spare_experts=n).predicted["memory_per_stage"][0]
        for n in (0, 2)
    ]
    ep, zero = (int(part.partition("=")[2]) for part in pins.split(",")[1:3])
    shard = 2 * 2 * 3 * 32 * 48 * 4 // (4 // ep if zero else 1)
    assert memory[1]["optimizer"] - memory[0]["optimizer"] == 2 * shard
    # Gradients are not all there at the fullest moment.
    assert memory[1]["total"] - memory[0]["total"] >= 3 * shard


def refused(program: Program, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        search_program(
            program, Cluster.parse("cpu:2"), global_batch_size=8, explain=False, **options
        )
    return str(caught.value)


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw-8bit"])
def test_states_that_are_not_of_elements(mixtral: Program, optimizer: str) -> None:
    text = refused(mixtral, spare_experts=1, optimizer=optimizer)
    assert f"spare_experts=1 with {optimizer}" in text and "adamw, sgd, sgd-momentum" in text


def test_what_would_fit_names_no_optimizer_that_is_refused(mixtral: Program) -> None:
    outcome = search_program(
        mixtral,
        Cluster.parse("cpu:2"),
        global_batch_size=8,
        memory_limit=1000,
        pins="ep=2,dp=2",
        spare_experts=1,
    )
    assert outcome.plan is None and outcome.result.infeasible is not None
    tried = str(outcome.result.infeasible.to_dict())
    assert "optimizer sgd" in tried and "adafactor" not in tried and "8bit" not in tried


@pytest.mark.parametrize("spare", [-1, True, 1.5])
def test_what_is_no_number_of_slots(mixtral: Program, spare: Any) -> None:
    assert f"spare_experts={spare!r}" in refused(mixtral, spare_experts=spare)


def test_a_model_without_experts(llama: Program) -> None:
    text = refused(llama, spare_experts=1)
    assert "the model has no experts" in text and "leave spare_experts out" in text


def test_a_plan_that_was_edited(mixtral: Program, tmp_path: Path) -> None:
    document = planned(mixtral, 4, 16, "dp=4,ep=4,zero=0", spare_experts=1).to_dict()
    path = tmp_path / "plan.json"
    for change, said in (
        ({"optimizer": "adafactor"}, "the states of adafactor are not of single elements"),
        ({"spare_experts": -1}, "spare_experts"),
        ({"spare_experts": "2"}, "spare_experts"),
    ):
        path.write_text(json.dumps({**document, **change}))
        with pytest.raises(PlanError, match=said):
            Plan.load(path)
