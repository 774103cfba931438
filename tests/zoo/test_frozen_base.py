"""LoRA on a frozen base: gradients and optimizer states are planned, and made, for adapters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.api import build
from autopar.models import ModelSource
from autopar.program import Program
from autopar.runtime.gradients import local_part
from tests.end_to_end.models import llama
from tests.end_to_end.plans import Planner
from tests.warm_ranks import run_on_forks, run_planner

STATES = 2  # of AdamW, per parameter
BYTES = 4
# Two micro-batches: with one, a prediction counts gradients and activations in turns.
PLANS = {
    "zero0": "dp=2,zero=0,microbatches=2",
    "zero1": "dp=2,zero=1,microbatches=2",
    "zero3": "dp=2,zero=3,microbatches=2",
    "pp2": "pp=2,microbatches=2",
    "tp2": "tp=2,weights=split,microbatches=2",
}


def lora(tied: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Adapters of PEFT on a Llama; `tied`: the frozen embedding is the output head too."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    base, inputs = llama(num_hidden_layers=2, tie_word_embeddings=tied)
    names = ["q_proj", "v_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(r=4, target_modules=names, lora_dropout=0.0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # PEFT starts them at 0, and so the gradients of A
                parameter.normal_(0.0, 0.1)
    return model, inputs


def trainable(model: nn.Module) -> dict[str, int]:
    return {n: p.numel() for n, p in model.named_parameters() if p.requires_grad}


def executed(plans: dict[str, autopar.Plan], captured: Program, tied: bool) -> dict[str, Any]:
    """What this rank holds after a step, by plan: bytes of gradients and of states, and names."""
    found = {}
    for name, plan in plans.items():
        model, inputs = lora(tied)
        program = build(model, plan, 8, lambda: captured, timeout_seconds=60)
        batch = {n: torch.cat([v, v.flip(1)]) for n, v in inputs.items()}
        loss = program.step(batch)
        parameters = dict(program.named_parameters())
        with_gradient = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        gradients = sum(local_part(g).nbytes for g in with_gradient.values())
        optimizer = torch.optim.AdamW(program.parameters())
        optimizer.step()
        by_parameter = {id(p): n for n, p in parameters.items()}
        states = {by_parameter.get(id(p), "others"): s for p, s in optimizer.state.items()}
        held = sum(
            local_part(value).nbytes
            for parameter, state in states.items()
            for value in state.values()
            if parameter != "others" and value.dim()
        )
        frozen = [n for n, p in parameters.items() if not p.requires_grad]
        found[name] = {
            "loss": float(loss),
            "stage": program.ranks.index("pp"),
            "gradients": (gradients, set(with_gradient)),
            "states": (held, set(states) - {"others"}),
            "frozen": len(frozen),
        }
    return found


def planned_and_executed(tied: bool) -> tuple[dict[str, dict[str, Any]], list[Any]]:
    """In a planner: the plans as documents, and what two ranks found."""
    planner = Planner(*lora_source(tied))
    plans = {name: planner.plan(2, pins) for name, pins in PLANS.items()}
    ranks = run_on_forks(executed, 2, (plans, planner.program, tied), timeout_seconds=200)
    return {name: plan.to_dict() for name, plan in plans.items()}, ranks


def lora_source(tied: bool) -> tuple[nn.Module, ModelSource]:
    model, inputs = lora(tied)
    return model, ModelSource("lora", model, inputs)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def case(request: pytest.FixtureRequest) -> tuple[bool, dict[str, autopar.Plan], list[Any]]:
    documents, ranks = run_planner(planned_and_executed, request.param)
    plans = {name: autopar.Plan.from_dict(document) for name, document in documents.items()}
    return request.param, plans, ranks


@pytest.mark.parametrize("name", PLANS)
def test_only_adapters_have_gradients_and_states(case: Any, name: str) -> None:
    tied, made, ranks = case
    model, _ = lora(tied)
    adapters = trainable(model)
    planned = made[name].predicted["memory_per_stage"]
    names: set[str] = set()
    for found in (rank[name] for rank in ranks):
        stage = planned[found["stage"]]
        for term, kind in (("gradients", "gradients"), ("optimizer", "states")):
            nbytes, holders = found[kind]
            # ZeRO-1 holds whole gradients between micro-batches, and its shard after the last one.
            left = stage[term] // 2 if (name, term) == ("zero1", "gradients") else stage[term]
            # A pipeline stage may be fullest in its first backward, before it has all gradients.
            first = (name, term) == ("pp2", "gradients") and left < nbytes
            assert left == nbytes or first, (term, stage, nbytes)
            assert holders <= set(adapters)
        names |= found["gradients"][1]
        assert found["frozen"]
    assert names == set(adapters)


def test_what_is_planned_follows_from_the_adapters(case: Any) -> None:
    tied, made, _ = case
    model, _ = lora(tied)
    whole = sum(trainable(model).values()) * BYTES
    for name, gradients, states in (("zero0", 1, 1), ("zero1", 1, 2), ("zero3", 2, 2)):
        (stage,) = made[name].predicted["memory_per_stage"]
        assert stage["gradients"] == whole // gradients
        assert stage["optimizer"] == STATES * whole // states
    total = sum(stage["optimizer"] for stage in made["pp2"].predicted["memory_per_stage"])
    assert total == STATES * whole


def test_losses_are_those_of_one_device(case: Any) -> None:
    tied, _, ranks = case
    model, inputs = lora(tied)
    batch = {n: torch.cat([v, v.flip(1)]) for n, v in inputs.items()}
    expected = model(**batch).loss.item()
    for rank in ranks:
        for name in PLANS:
            assert rank[name]["loss"] == pytest.approx(expected, rel=1e-5)
