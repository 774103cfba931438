"""Models whose sequences are split: bidirectional, with an attention and a loss of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

MODELS = __file__
VOCABULARY, SEQUENCE, WIDTH = 96, 16, 32


def _ids() -> Tensor:
    return torch.arange(4 * SEQUENCE).view(4, SEQUENCE) * 7 % VOCABULARY


def bert() -> tuple[nn.Module, dict[str, Tensor]]:
    """Masked language model: attention to both sides, few labels, a padding mask as an input."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    ids = _ids()
    labels = torch.where(ids % 5 == 0, ids, -100)
    mask = torch.ones_like(ids)
    mask[1, 11:] = 0
    return model, {"input_ids": ids, "labels": labels, "attention_mask": mask}


class OwnAttention(nn.Module):
    """Scores as a product, a bias that falls with the distance, a causal mask, a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.slope = nn.Parameter(torch.rand(self.heads))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        place = torch.arange(length, device=x.device)
        distance = place[:, None] - place[None, :]
        scores = q @ k.transpose(-1, -2) / 4 - self.slope.view(-1, 1, 1) * distance.abs()
        scores = scores.masked_fill(distance < 0, float("-inf"))
        mixed = scores.softmax(-1) @ v
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class OwnModel(nn.Module):
    """Positions as a parameter, a loss that cuts the last logits off, and a pooled term."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(1, SEQUENCE, WIDTH))
        self.layers = nn.ModuleList(OwnAttention() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids) + self.places
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
        pooled = x.mean(1).square().mean()
        return loss + 0.1 * pooled


def own() -> tuple[nn.Module, dict[str, Any]]:
    ids = _ids()
    return OwnModel(), {"input_ids": ids, "labels": ids.clone()}


class Scan(nn.Module):
    """A recurrence: every position needs all of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.cell(self.norm(x))[0]
        return x + found


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Scan() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def recurrent() -> tuple[nn.Module, dict[str, Tensor]]:
    ids = _ids()
    return Recurrent(), {"input_ids": ids, "labels": ids.clone()}
