"""Which optimizers hold states of a parameter."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from autopar.runtime.live_optimizers import live_optimizers


def stepped(*parameters: nn.Parameter, momentum: float = 0.9) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=momentum)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


@pytest.fixture
def weights() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(2)) for _ in range(3)]


def test_those_with_states_of_the_parameters(weights: list[nn.Parameter]) -> None:
    assert live_optimizers(weights) == []
    first, second = stepped(*weights[:2]), stepped(weights[2])
    assert live_optimizers(weights[1:2]) == [first]
    assert live_optimizers(weights[1:], second) == [first]
    assert live_optimizers(weights, first) == [second]


def test_states_that_were_loaded_count(weights: list[nn.Parameter]) -> None:
    saved = copy.deepcopy(stepped(weights[0]).state_dict())
    other = torch.optim.SGD(weights[:1], lr=0.1, momentum=0.9)
    assert live_optimizers(weights) == []
    other.load_state_dict(saved)
    assert live_optimizers(weights) == [other]


def test_a_count_of_steps_and_no_state_do_not(weights: list[nn.Parameter]) -> None:
    plain = stepped(*weights, momentum=0.0)
    counting = torch.optim.SGD(weights, lr=0.1)
    counting.state[weights[0]]["step"] = torch.tensor(3.0)
    assert live_optimizers(weights) == []
    assert plain.param_groups and counting.state


def test_those_that_only_their_scheduler_holds_are_gone(weights: list[nn.Parameter]) -> None:
    optimizer = stepped(*weights)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert live_optimizers(weights) == [optimizer]
    del optimizer, scheduler
    assert live_optimizers(weights) == []
