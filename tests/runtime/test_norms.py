"""Norms and clipping of one rank equal torch's (several stages and shards: test_state.py)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from autopar.runtime.norms import OtherStages, global_norm, scale_gradients
from autopar.runtime.ranks import Ranks


def parameters(ranks: Ranks) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = []
    for size in (3, 5):
        value = DTensor.from_local(torch.zeros(size), ranks.device_mesh["tp"], [Replicate()])
        parameter = nn.Parameter(value)
        parameter.grad = DTensor.from_local(
            torch.randn(size), ranks.device_mesh["tp"], [Replicate()]
        )
        made.append(parameter)
    return made


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_global_norm(one_rank: Ranks, norm_type: float) -> None:
    made = parameters(one_rank)
    flat = torch.cat([p.grad.to_local() for p in made])  # type: ignore[union-attr]
    assert float(global_norm(made, norm_type, one_rank)) == pytest.approx(
        float(flat.norm(norm_type))
    )
    assert global_norm([], norm_type, one_rank) == 0


def test_what_is_counted_of_a_gradient(one_rank: Ranks) -> None:
    made = parameters(one_rank)

    def counted(parameter: nn.Parameter, norm_type: float) -> torch.Tensor | None:
        return parameter.grad if parameter is made[0] and norm_type == 2.0 else None

    assert made[0].grad is not None
    expected = float(made[0].grad.norm().full_tensor())  # type: ignore[attr-defined]
    assert float(global_norm(made, 2.0, one_rank, counted)) == pytest.approx(expected)


def test_clipping(one_rank: Ranks) -> None:
    made = parameters(one_rank)
    norm = global_norm(made, 2.0, one_rank)
    scale_gradients(made, norm, 2 * float(norm))
    assert float(global_norm(made, 2.0, one_rank)) == pytest.approx(float(norm))
    scale_gradients(made, norm, 0.5)
    assert float(global_norm(made, 2.0, one_rank)) == pytest.approx(0.5, rel=1e-5)


def test_number_for_the_other_stages(one_rank: Ranks) -> None:
    """Here the others are played by a parameter that is owned but not in the rank's list."""
    made = parameters(one_rank)
    total = float(global_norm(made, 2.0, one_rank))
    others = OtherStages(made[0], one_rank)
    others.update(made, made[:1])
    seen = torch.nn.utils.clip_grad_norm_([made[0], others.parameter], 1e9)
    assert isinstance(seen, DTensor)
    assert float(seen.full_tensor()) == pytest.approx(total, rel=1e-5)
