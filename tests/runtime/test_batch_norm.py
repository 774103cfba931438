"""Batch norm over ranks equals torch's on the whole batch, with all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from autopar.runtime import collectives  # noqa: F401 - registers the ops
from tests.warm_ranks import run_on_ranks

ops = torch.ops.autopar
CHANNELS, ROWS, EPS = 3, 12, 1e-5
SHAPES: list[tuple[int, ...]] = [(ROWS, CHANNELS), (ROWS, CHANNELS, 5), (ROWS, CHANNELS, 2, 4)]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def mine(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()].clone()


def check(shape: tuple[int, ...], dtype: torch.dtype, scale: bool, shift: bool) -> None:
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    torch.manual_seed(5)
    # A mean far above the deviation: E[x^2] - E[x]^2 would lose digits that matter. Ranks differ.
    x = torch.randn(shape, dtype=torch.float64) + torch.arange(ROWS).view(
        -1, *[1] * (len(shape) - 1)
    )
    x = (x + (100 if dtype in (torch.float64, torch.float32) else 0)).to(dtype)
    weight = torch.randn(CHANNELS, dtype=torch.float64).to(dtype) if scale else None
    bias = torch.randn(CHANNELS, dtype=torch.float64).to(dtype) if shift else None
    direction = torch.randn(shape, dtype=torch.float64)

    def leaves(values: Any, wide: bool) -> list[Any]:
        return [
            None if v is None else (v.double() if wide else v).clone().requires_grad_()
            for v in values
        ]

    whole = leaves((x, weight, bias), True)
    expected = functional.batch_norm(whole[0], None, None, whole[1], whole[2], True, 0.1, EPS)
    (expected * direction).sum().backward()
    own = leaves((mine(x), weight, bias), False)
    result = ops.batch_norm(own[0], own[1], own[2], EPS, ranks, group)
    assert result.dtype == dtype
    (result * mine(direction).to(dtype)).sum().backward()
    close(result.detach(), mine(expected.detach()), dtype)
    close(own[0].grad, mine(whole[0].grad), dtype)
    for got, wanted in zip(own[1:], whole[1:], strict=True):
        if wanted is not None:
            total = got.grad.double()
            dist.all_reduce(total)
            close(total.to(dtype), wanted.grad, dtype)


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    error = (got.double() - expected).norm() / expected.norm().clamp_min(1e-12)
    assert got.dtype == dtype and error < TOLERANCE[dtype], (error, dtype)


def check_statistics() -> None:
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    torch.manual_seed(6)
    x = torch.randn(ROWS, CHANNELS, 4, dtype=torch.float64) + torch.arange(ROWS)[:, None, None]
    for dims in ([0], [0, 2], [2, 0], [0, 1, 2]):
        mean = ops.batch_mean(mine(x), dims, ranks, group)
        variance = ops.batch_variance(mine(x), dims, ranks, group)
        torch.testing.assert_close(mean, x.mean(dims), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(variance, x.var(dims), rtol=1e-12, atol=1e-12)


def on_ranks() -> str:
    for dtype in TOLERANCE:
        for shape in SHAPES:
            for affine in ((True, True), (True, False), (False, False)):
                check(shape, dtype, *affine)
    check_statistics()
    return "equal"


@pytest.mark.parametrize("ranks", [2, 4])
def test_equals_the_whole_batch(ranks: int) -> None:
    assert run_on_ranks(on_ranks, ranks, timeout_seconds=100) == ["equal"] * ranks


def test_shapes_without_data() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 3, 5, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(3, dtype=torch.bfloat16, requires_grad=True)
        y = ops.batch_norm(x, weight, None, EPS, 2, "dp")
        assert y.shape == x.shape and y.dtype == x.dtype
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
        assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
        assert ops.batch_mean(x, [0, 2], 2, "dp").shape == (3,)
        assert ops.batch_variance(x, [0, 2], 2, "dp").shape == (3,)
