"""Optimizer state by name: what has not stepped can be loaded into, and continues exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import UsageError
from autopar.runtime.optimizer_state import load_optimizer_state, optimizer_state

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(4, 3)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_optimizer_continues_where_another_stopped(name: str) -> None:
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    optimizer = OPTIMIZERS[name](model.parameters())
    for seed in range(3):
        train(model, optimizer, seed)
    twin.load_state_dict(model.state_dict())
    other = OPTIMIZERS[name](twin.parameters())
    template = optimizer_state(other, dict(twin.named_parameters()))
    saved = copy.deepcopy(optimizer_state(optimizer, dict(model.named_parameters())))
    assert template.keys() == saved.keys()
    load_optimizer_state(other, dict(twin.named_parameters()), saved)
    train(model, optimizer, 9)
    train(twin, other, 9)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_making_the_state_changes_nothing() -> None:
    model, twin = nn.Linear(3, 2), nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer_state(optimizer, dict(model.named_parameters()))
    assert torch.equal(model.weight, twin.weight)
    assert torch.equal(model.weight.grad, torch.ones(2, 3))
    assert optimizer.param_groups[0]["lr"] == 0.1
    train(model, optimizer, 1)
    train(twin, torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.5), 1)
    torch.testing.assert_close(model.weight, twin.weight, rtol=0, atol=0)


def test_a_state_of_another_model_is_refused() -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match=r"nothing for parameter 'weight'"):
        load_optimizer_state(optimizer, dict(model.named_parameters()), {"state.other.step": 1})
