"""Models that take or return something unusual, in the form `file.py:function`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.end_to_end.models import llama

ROWS, WIDTH, CLASSES = 4, 16, 8


@dataclass
class Features:
    """An input of several tensors."""

    dense: torch.Tensor
    codes: list[torch.Tensor]


@dataclass
class Output:
    """An output of a user's own class."""

    scores: torch.Tensor
    loss: torch.Tensor
    penalty: torch.Tensor


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, features: Features, scale: float, input: dict[str, torch.Tensor]) -> Output:
        hidden = features.dense * scale
        for codes in features.codes:
            hidden = hidden + self.table(codes)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        scores = self.head(hidden)
        penalty = scores.pow(2).mean()
        loss = F.cross_entropy(scores, input["target"])
        return Output(scores, loss, penalty)


def nested() -> tuple[nn.Module, dict[str, Any]]:
    """A dataclass with a list, a fixed number, a dict, and names that Python and torch use too."""
    features = Features(torch.ones(ROWS, WIDTH), [_codes(), _codes() + 8])
    return Nested(), {"features": features, "scale": 2.0, "input": {"target": _codes() % CLASSES}}


def _codes() -> torch.Tensor:
    return torch.arange(ROWS) * 5


def logits_only() -> tuple[nn.Module, dict[str, Any], Any]:
    """The loss is the caller's; labels and weights never reach the model."""
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    inputs = {"input": torch.ones(ROWS, WIDTH), "labels": _codes() % CLASSES}
    return model, inputs, smoothed_loss


def smoothed_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, labels, label_smoothing=0.1)


def packed() -> tuple[nn.Module, dict[str, Any]]:
    """Two sequences in each row: a block-diagonal causal mask, positions that start again."""
    model, inputs = llama(num_hidden_layers=2)
    length = inputs["input_ids"].shape[1]
    cut = torch.tensor([length // 2, length // 4, length // 2, 3])
    place = torch.arange(length).expand(ROWS, length)
    second = place >= cut[:, None]
    same = second[:, :, None] == second[:, None, :]
    mask = same & torch.ones(length, length, dtype=torch.bool).tril()
    positions = torch.where(second, place - cut[:, None], place)
    return model, {**inputs, "attention_mask": mask[:, None], "position_ids": positions}


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.GELU())
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


def batch_norm() -> tuple[nn.Module, dict[str, Any]]:
    return Normalised(), {"x": torch.ones(ROWS, WIDTH), "labels": _codes() % CLASSES}


def frozen_tied() -> tuple[nn.Module, dict[str, Any]]:
    """Input and output embedding are one tensor; the first layer is frozen."""
    model, inputs = llama(num_hidden_layers=2, tie_word_embeddings=True)
    for parameter in model.get_submodule("model.layers.0").parameters():
        parameter.requires_grad_(False)
    return model, inputs


def bf16() -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = llama(num_hidden_layers=2)
    return model.to(torch.bfloat16), inputs


def fp16() -> tuple[nn.Module, dict[str, Any]]:
    model, inputs = llama(num_hidden_layers=2)
    return model.to(torch.float16), inputs


class Shared(nn.Module):
    """Two matrices that the first and the last layer share, and read in opposite orders."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH) * 0.1)
        self.second = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) * 0.1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x @ self.first @ self.second)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.cross_entropy(x @ self.second.T @ self.first.T, labels)


def shared() -> tuple[nn.Module, dict[str, Any]]:
    return Shared(), {"x": torch.ones(ROWS, WIDTH), "labels": _codes() % CLASSES}


class LearnedQueries(nn.Module):
    """Queries of its own for every sample: a view of a parameter crosses the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 6, WIDTH))
        self.keys = nn.Linear(WIDTH, WIDTH)
        self.head = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        queries = self.queries.expand(x.shape[0], -1, -1)
        mixed = (queries @ self.keys(x).transpose(1, 2)).softmax(-1) @ x
        return F.mse_loss(self.head(mixed), y)


def learned_queries() -> tuple[nn.Module, dict[str, Any]]:
    """A parameter that is expanded over the batch, and buffers that a step changes by `out=`."""
    return LearnedQueries(), {"x": torch.ones(ROWS, 8, WIDTH), "y": torch.ones(ROWS, 6, WIDTH)}
