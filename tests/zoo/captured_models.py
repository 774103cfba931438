"""Models whose forward asks something unusual of the capture, in the form `file.py:function`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

ROWS, LENGTH, WIDTH, CLASSES = 4, 6, 16, 8


def _inputs() -> dict[str, Any]:
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % CLASSES
    return {"ids": ids, "labels": ids.roll(1, 1)}


class SeveralTerms(nn.Module):
    """A mean over targets, means over tokens, and a term that reads parameters alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = hidden + F.gelu(layer(hidden))
        logits = self.head(hidden)
        loss = F.cross_entropy(logits.view(-1, CLASSES), labels.view(-1))
        loss = loss + 0.1 * logits.logsumexp(-1).square().mean()
        return loss + 0.3 * self.layers[1].weight.square().sum()  # type: ignore[operator, union-attr]


def several_terms() -> tuple[nn.Module, dict[str, Any]]:
    return SeveralTerms(), _inputs()


class Recomputed(nn.Module):
    """Reentrant checkpoints around layers, and vectors that `no_grad` code moves."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(2)
        )
        self.bounded = spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = hidden + checkpoint(layer, hidden, use_reentrant=True)
        hidden = hidden + self.bounded(hidden)
        return F.cross_entropy(self.head(hidden).view(-1, CLASSES), labels.view(-1))


def recomputed() -> tuple[nn.Module, dict[str, Any]]:
    return Recomputed(), _inputs()


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(CLASSES, WIDTH)
        self.sum = nn.EmbeddingBag(CLASSES, WIDTH, mode="sum", padding_idx=0)
        self.up, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(self.up(self.mean(ids) + self.sum(ids)))
        return F.multi_margin_loss(self.head(hidden), classes)


def bags() -> tuple[nn.Module, dict[str, Any]]:
    ids = _inputs()["ids"]
    return Bags(), {"ids": ids, "classes": ids[:, 0]}
