"""A layer's experts are one op of the captured graph, whoever wrote them, and nothing stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.errors import CaptureError
from autopar.passes.capture import capture
from autopar.passes.capture_experts import experts_as_one_op
from autopar.program import Program
from autopar.workflow.prepare import prepare
from benchmarks.zoo.architecture import Toy
from benchmarks.zoo.verify import captured_error
from tests.passes.expert_toys import GATED, PLAIN, OwnModel, inputs, known, library

LIBRARY = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3")


def calls(program: Program) -> list[fx.Node]:
    return [n for n in program.graph.nodes if getattr(n.target, "_opname", "") == "experts"]


def names(program: Program) -> set[str]:
    return {str(n.target) for n in program.graph.nodes if n.op == "call_function"}


@pytest.mark.parametrize("kind", LIBRARY)
def test_one_op_for_each_layer_of_the_library(kind: str) -> None:
    model, example = library(kind)
    before = model.config._experts_implementation
    program = capture(model, example, dtype=torch.float32)
    found = calls(program)
    layers = 2 if kind != "deepseek_v3" else 1
    assert len(found) == layers and len({n.args[-1] for n in found}) == 1
    assert not {n for n in names(program) if "grouped" in n or "histc" in n}
    assert {"batch", "sequence"} == set(program.symbols)
    assert model.config._experts_implementation == before
    for graph in (program, prepare(program, program.sizes)):
        assert captured_error(graph, Toy(model, example)) <= 1e-5


def test_nothing_stays_when_the_capture_fails() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    model, example = library("mixtral")
    before = dict(vars(model.model.layers[0].mlp.experts))
    names_before = set(ALL_EXPERTS_FUNCTIONS)
    with pytest.raises(CaptureError):
        capture(model, {"input_ids": example["input_ids"].float(), "labels": example["labels"]})
    assert vars(model.model.layers[0].mlp.experts) == before
    assert set(ALL_EXPERTS_FUNCTIONS) == names_before
    assert model.config._experts_implementation != "autopar"


def test_equal_programs_have_equal_fingerprints_and_other_functions_others() -> None:
    model, example = library("mixtral")
    program = capture(model, example)
    assert program.fingerprint() == capture(copy.deepcopy(model), example).fingerprint()
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = nn.GELU()
    assert program.fingerprint() != capture(model, example).fingerprint()


@pytest.mark.parametrize("gate", [True, False])
def test_declared_experts_are_one_op(gate: bool) -> None:
    torch.manual_seed(0)
    model = OwnModel(gate)
    with known(**(GATED if gate else PLAIN)):
        program = capture(model, inputs())
    assert len(calls(program)) == 1
    assert captured_error(program, Toy(model, inputs())) <= 1e-5
    # The model's own forward is as it was.
    assert "forward" not in vars(model.experts)
    with pytest.raises(CaptureError, match="experts"):
        capture(model, inputs())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a name that is not there": ({**GATED, "down": "w9"}, "no tensor 'w9'"),
    "other shapes": ({**GATED, "transposed": True}, "tokens of 8 numbers"),
    "a function with parameters": (
        {**PLAIN, "activation": lambda module, x: x @ module.w2[0].T},
        "can't be kept",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_declaration_that_does_not_fit_is_an_error(name: str) -> None:
    declaration, why = WRONG[name]
    with known(**declaration), pytest.raises(CaptureError, match=why):
        capture(OwnModel("gate" in declaration), inputs())


def test_experts_of_the_library_that_can_not_be_one_op_are_told() -> None:
    model, _ = library("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts.act_fn = nn.PReLU()
    with experts_as_one_op(model) as notes:
        assert len(notes) == 2
        assert "model.layers.0.mlp.experts are many ops" in notes[0]
