"""Adapters of low rank: on which layers, what is trained, and what else stays as it was."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from autopar.adapters import add_adapters, split_adapters, with_adapters
from autopar.api import search_plan
from autopar.errors import UsageError
from autopar.models import resolve_model

RANK = 4


class Net(nn.Module):
    """Torch's attention reads its output layer's weight itself; the head shares the embedding's."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        logits = self.head(x + self.down(self.up(x).relu())) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def test_linear_layers_get_them_and_nothing_else_is_trained() -> None:
    model = Net()
    add_adapters(model, RANK)
    trained = {n: tuple(p.shape) for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {
        "up.lora_A.default.weight": (RANK, 8),
        "up.lora_B.default.weight": (16, RANK),
        "down.lora_A.default.weight": (RANK, 16),
        "down.lora_B.default.weight": (8, RANK),
    }
    assert model.head.weight is model.embed.weight


def test_a_copy_is_planned_and_the_model_stays_as_it_is() -> None:
    model = Net()
    before = {n: (id(p), p.requires_grad) for n, p in model.named_parameters()}
    copied = with_adapters(model, RANK)
    assert {n: (id(p), p.requires_grad) for n, p in model.named_parameters()} == before
    assert all(p.is_meta for p in copied.parameters()) and not copied.scale.is_meta
    assert copied.head.weight is copied.embed.weight


def test_llama_has_as_many_as_published() -> None:
    """41.9 million for all linear layers of Llama-3-8B at rank 16."""
    model = resolve_model("zoo:llama3-8b+lora:16", sequence=64, dtype=torch.bfloat16)
    trained = sum(p.numel() for p in model.model.parameters() if p.requires_grad)
    assert trained == 41_943_040 and model.name == "zoo:llama3-8b+lora:16"


def test_what_can_not_have_them_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no linear layers"):
        add_adapters(nn.Sequential(nn.Conv2d(3, 4, 1)), RANK)
    frozen = Net().requires_grad_(False)
    with pytest.raises(UsageError, match="frozen already"):
        with_adapters(frozen, RANK)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UsageError, match="need PEFT") as error:
        add_adapters(Net(), RANK)
    assert "autopar[lora]" in str(error.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("zoo:gpt2", ("zoo:gpt2", 0)),
        ("zoo:gpt2+lora:8", ("zoo:gpt2", 8)),
        ("a+b/net.py:make+lora:1", ("a+b/net.py:make", 1)),
    ],
)
def test_the_name_of_a_model_says_its_rank(text: str, parts: tuple[str, int]) -> None:
    assert split_adapters(text) == parts


@pytest.mark.parametrize("rank", ["0", "-1", "x", "", "9" * 30, "1.5"])
def test_no_rank(rank: str) -> None:
    with pytest.raises(UsageError, match="is not a rank"):
        split_adapters(f"zoo:gpt2+lora:{rank}")


def test_lora_is_a_remedy_that_is_solved() -> None:
    """Its plan is that of the model with adapters, and fits."""
    model, ids = Net(256), torch.zeros(2, 4, dtype=torch.int64)
    asked = {"example_inputs": {"ids": ids}, "global_batch_size": 2, "precision": "fp32"}
    alone = search_plan(with_adapters(model, 16), "cpu:1", memory_limit=10**9, **asked)
    assert alone.plan is not None
    limit = alone.plan.predicted["memory_per_stage"][0]["total"]
    told = search_plan(model, "cpu:1", memory_limit=limit, **asked).result.infeasible
    assert told is not None
    lora = next(r for r in told.relaxations if r.change.startswith("LoRA"))
    assert lora.fits and lora.peak_bytes is not None and lora.peak_bytes <= limit
    assert lora.step_seconds == alone.plan.predicted["step_seconds"]
