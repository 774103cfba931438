"""Models of rows: those of the zoo by name and size, stand-ins with and without experts."""

from __future__ import annotations

import pytest
import torch

from autopar.models import zoo_names
from autopar.workflow.row_model import _rules, build, head_size, zoo_model
from autopar.workflow.stand_in import LAYERS, Architecture


def test_every_rule_leads_somewhere() -> None:
    for rule in _rules():
        assert ("zoo" in rule) != ("head_size" in rule)
        assert rule.get("zoo", zoo_names()[0]) in zoo_names()


def test_a_zoo_model_is_taken_where_the_row_has_its_size() -> None:
    row = {"model": "DeepSeek-V3 671B", "layers": "61", "hidden": "7168"}
    assert zoo_model(row) == "deepseek-v3"
    assert zoo_model(row | {"layers": "4"}) == ""
    assert zoo_model({"model": "GPT 3", "layers": "61", "hidden": "7168"}) == ""
    assert (head_size({"model": "Qwen3_235B_a22B"}), head_size({"model": "GPT"})) == (128, 0)


@pytest.mark.parametrize("gated", [True, False])
def test_a_stand_in_with_experts_has_the_parameters_it_says(gated: bool) -> None:
    shape = Architecture(256, 4, 2, 128, 1000, gated, False, experts=8, topk=2, head_size=32)
    model, inputs = build(shape, 64, torch.bfloat16)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    assert matrices == shape.parameters(LAYERS)
    assert inputs["input_ids"].shape[1] == 64


def test_a_model_of_the_zoo() -> None:
    model, inputs = build("gpt2", 128, torch.bfloat16)
    assert {p.device.type for p in model.parameters()} == {"meta"}
    assert inputs["labels"].shape[1] == 128
