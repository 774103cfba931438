"""Means and sums over ranks, and their gradients, against one process with all samples."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar.runtime import collectives  # noqa: F401 - registers the ops
from tests.warm_ranks import run_on_ranks

RANKS, ROWS, WIDTH = 4, 6, 3


def samples() -> torch.Tensor:
    made = torch.randn(RANKS * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    return made.double().requires_grad_()


def loss(load: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """No function of the sums alone: every sample reads them."""
    return ((rows - load) * load.square()).square().sum()


def on_ranks(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    whole, rank = samples(), dist.get_rank()
    own = whole[rank * ROWS : (rank + 1) * ROWS].detach().requires_grad_()
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    if kind == "mean":
        load = torch.ops.autopar.batch_average(own.mean(0), RANKS, group)
    else:
        load = torch.ops.autopar.batch_total(own.sum(0), group)
    torch.autograd.backward(loss(load, own))
    assert own.grad is not None
    return load.detach(), own.grad


@pytest.mark.parametrize("kind", ["mean", "sum"])
def test_values_and_gradients(kind: str) -> None:
    whole = samples()
    load = whole.mean(0) if kind == "mean" else whole.sum(0)
    torch.autograd.backward(loss(load, whole))
    assert whole.grad is not None
    by_rank = run_on_ranks(on_ranks, RANKS, (kind,), timeout_seconds=60)
    for rank, (found, gradient) in enumerate(by_rank):
        torch.testing.assert_close(found, load.detach())
        torch.testing.assert_close(gradient, whole.grad[rank * ROWS : (rank + 1) * ROWS])


def counted() -> torch.Tensor:
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    found: torch.Tensor = torch.ops.autopar.batch_total(
        torch.full((2,), dist.get_rank() + 1, dtype=torch.int32), group
    )
    return found


def test_counts_stay_whole_numbers() -> None:
    for found in run_on_ranks(counted, RANKS, timeout_seconds=60):
        assert found.dtype == torch.int32 and found.tolist() == [10, 10]
