"""A user's own layer of experts, declared, and the library's, in small models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.experts.declaration import declare_experts, forget_experts
from tests.end_to_end import expert_models

HIDDEN, INNER, EXPERTS, CHOICES, CLASSES = 8, 6, 4, 2, 5


class OwnExperts(nn.Module):
    """As a user writes them: a loop over experts, which can't be captured as it stands."""

    def __init__(self, gate: bool = True) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN)) if gate else None
        self.w3 = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN))
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden)
        for expert in range(EXPERTS):
            token, choice = torch.where(index == expert)
            rows = hidden[token]
            up = rows @ self.w3[expert].T
            made = up.tanh() if self.w1 is None else functional.silu(rows @ self.w1[expert].T) * up
            made = (made @ self.w2[expert].T) * weights[token, choice, None]
            result = result.index_add(0, token, made)
        return result


class OwnModel(nn.Module):
    def __init__(self, gate: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = OwnExperts(gate)
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        weights, index = self.router(x).softmax(-1).topk(CHOICES, -1)
        return functional.cross_entropy(self.head(x + self.experts(x, index, weights)), target)


class AllExperts(nn.Module):
    """Every expert computes every token."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER))
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN))

    def forward(self, rows: Tensor) -> Tensor:
        return torch.bmm(gated(self, torch.bmm(rows, self.up)), self.down)


class AllToAll(nn.Module):
    """Scores of experts that were not chosen are zero."""

    def __init__(self, choices: int) -> None:
        super().__init__()
        self.choices = choices
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = AllExperts()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x).sigmoid().topk(self.choices, -1)
        scores = weights.new_zeros(x.shape[0], EXPERTS).scatter(1, index, weights)
        return self.experts(scores.T.unsqueeze(-1) * x).sum(0)


def choices_alone(layer: AllToAll, x: Tensor) -> Tensor:
    weights, index = layer.router(x).sigmoid().topk(layer.choices, -1)
    made: Tensor = layer.experts(x, index, weights)
    return made


class AllToAllModel(nn.Module):
    def __init__(self, choices: int) -> None:
        super().__init__()
        self.layer, self.head = AllToAll(choices), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(self.head(x + self.layer(x)), target)


def gated(_: nn.Module, x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


GATED: dict[str, Any] = {"gate": "w1", "up": "w3", "down": "w2", "activation": gated}
PLAIN: dict[str, Any] = {"up": "w3", "down": "w2", "activation": lambda _, x: x.tanh()}


ALL: dict[str, Any] = {
    "up": "up",
    "down": "down",
    "activation": gated,
    "transposed": True,
    "gated": True,
    "weighs_inputs": True,
    "layer": AllToAll,
    "routed": choices_alone,
}


@contextmanager
def known(kind: type[nn.Module] = OwnExperts, **declaration: Any) -> Iterator[None]:
    declare_experts(kind, **declaration)
    try:
        yield
    finally:
        forget_experts(kind)


def inputs() -> dict[str, Tensor]:
    return {"x": torch.randn(6, HIDDEN), "target": torch.arange(6) % CLASSES}


def library(kind: str) -> expert_models.Toy:
    made: expert_models.Toy = getattr(expert_models, kind)()
    return made
