"""Numbers that Python draws while a model is traced are no part of the graph: refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from random import random as imported_before

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.passes.capture import capture

X = torch.ones(4, 4)


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.function = function
        self.own = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x)).sum()


def skips(z: Tensor) -> Tensor:
    return z if random.random() < 0.5 else z * 2


def scales(z: Tensor) -> Tensor:
    return z * float(np.random.uniform(1, 2))


def masks(z: Tensor) -> Tensor:
    return z * float(np.random.default_rng().integers(9))


@pytest.mark.parametrize("function", [skips, scales, masks])
def test_a_draw_is_refused_at_its_line(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError) as info:
        capture(Model(function), {"x": X})
    assert f"{__file__}:{function.__code__.co_firstlineno + 1}" in info.value.message
    assert "torch.rand" in info.value.next_step


def test_draws_that_can_only_be_seen_afterwards() -> None:
    with pytest.raises(CaptureError, match="random draws a number"):
        capture(Model(lambda z: z * imported_before()), {"x": X})

    class Holds(Model):
        def forward(self, x: Tensor) -> Tensor:
            return (self.inner(x) * self.own.random()).sum()

    with pytest.raises(CaptureError, match="the generator 'own'"):
        capture(Holds(torch.relu), {"x": X})


def test_a_forward_that_seeds_draws_the_same_every_time() -> None:
    def fixed(z: Tensor) -> Tensor:
        np.random.seed(0)
        random.seed(0)
        rows = np.random.permutation(4).tolist()
        random.shuffle(rows)
        return z[:, rows] * float(np.random.default_rng(5).random())

    capture(Model(fixed), {"x": X})


def test_the_generators_are_as_before() -> None:
    before = random.random, np.random.rand, random.getstate()
    capture(Model(torch.relu), {"x": X})
    assert before[:2] == (random.random, np.random.rand)
    assert random.getstate() == before[2]
