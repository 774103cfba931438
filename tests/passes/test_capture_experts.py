"""A layer's experts are one op of the captured graph, whoever wrote them, and nothing stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.errors import CaptureError
from autopar.op_call import Bindings, op_call
from autopar.passes.capture import capture
from autopar.passes.capture_experts import experts_as_one_op
from autopar.program import Program
from autopar.rules import rule_for
from autopar.workflow.prepare import prepare
from benchmarks.zoo.architecture import Toy
from benchmarks.zoo.verify import captured_error
from tests.passes.expert_toys import (
    ALL,
    CHOICES,
    GATED,
    HIDDEN,
    INNER,
    PLAIN,
    AllExperts,
    AllToAllModel,
    OwnModel,
    inputs,
    known,
    library,
)

LIBRARY = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "llama4_text")


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


@pytest.mark.parametrize("choices", [1, CHOICES])
def test_a_layer_that_sends_all_tokens_to_all_experts_sends_choices_alone(choices: int) -> None:
    torch.manual_seed(0)
    model, batch = AllToAllModel(choices), inputs()
    with known(AllExperts, **ALL):
        program = capture(model, batch)
    (call,) = calls(program)
    tokens = len(batch["x"])
    rule = rule_for(op_call(call, Bindings(program.symbols, program.sizes)))
    assert rule is not None and rule.flops == 2 * tokens * choices * HIDDEN * 3 * INNER
    assert "FLOPs are those of the choices" in program.notes[0]
    assert captured_error(program, Toy(model, batch)) <= 1e-5
    assert "forward" not in vars(model.layer) and "forward" not in vars(model.layer.experts)
    # By itself every expert computes every token.
    program = capture(model, batch)
    assert not calls(program) and not program.notes


def test_gradients_through_weights_on_inputs() -> None:
    """Of the layer with choices alone against its own forward, which has all rows."""
    torch.manual_seed(1)
    layer = AllToAllModel(CHOICES).double().layer
    x = torch.randn(7, HIDDEN, dtype=torch.float64, requires_grad=True)
    leaves, seed = [x, *layer.parameters()], torch.randn(7, HIDDEN, dtype=torch.float64)
    expected = layer(x)
    wanted = torch.autograd.grad(expected, leaves, seed)
    with known(AllExperts, **ALL), experts_as_one_op(layer):
        got = layer(x)
        found = torch.autograd.grad(got, leaves, seed)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(found, wanted)


def test_experts_that_get_no_index_need_their_layer() -> None:
    alone = {k: v for k, v in ALL.items() if k not in ("layer", "routed")}
    with known(AllExperts, **alone), pytest.raises(CaptureError, match="1 arguments") as caught:
        capture(AllToAllModel(1), inputs())
    assert "layer=" in caught.value.next_step


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
