"""Split embedding and cross entropy equal torch's on one device."""

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
TOKENS, CLASSES, WIDTH, IGNORED = 12, 16, 5, -100
LOSSES = [
    (dtype, smoothing, ignored)
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
    for smoothing in (0.0, 0.1)
    for ignored in (0, 5)
]


def mine(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def loss_inputs(dtype: torch.dtype, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    # Large logits: without the common maximum the exponentials overflow.
    logits = (torch.randn(TOKENS, CLASSES, dtype=torch.float64) * 40 + 200).to(dtype)
    target = torch.randint(CLASSES, (TOKENS,))
    target[:ignored] = IGNORED
    return logits, target


def close(got: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected.to(dtype), rtol=tolerance, atol=tolerance)


def check_losses() -> None:
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    for dtype, smoothing, ignored in LOSSES:
        logits, target = loss_inputs(dtype, ignored)
        whole = logits.clone().requires_grad_()
        expected = functional.cross_entropy(
            whole, target, ignore_index=IGNORED, label_smoothing=smoothing
        )
        (expected * 3).backward()
        assert whole.grad is not None
        local = mine(logits, 1).clone().requires_grad_()
        loss = ops.vocab_cross_entropy(local, target, IGNORED, smoothing, ranks, group)
        (loss * 3).backward()
        close(loss.detach(), expected, dtype)
        close(local.grad, mine(whole.grad, 1), dtype)
        if smoothing:
            continue
        rows = mine(logits, 0).clone().requires_grad_()
        part = ops.token_cross_entropy(rows, mine(target, 0), IGNORED, ranks, group)
        (part * 3).backward()
        close(rows.grad, mine(whole.grad, 0), dtype)
        total = part.detach().to(torch.float64)
        dist.all_reduce(total)
        close(total.to(dtype), expected, dtype)


def check_no_target() -> None:
    """NaN as torch's, and gradients without NaN once the loss is masked."""
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    logits, target = loss_inputs(torch.float32, TOKENS)
    for loss_of in (
        lambda x: ops.vocab_cross_entropy(x, target, IGNORED, 0.0, ranks, group),
        lambda x: ops.token_cross_entropy(x, target, IGNORED, ranks, group),
        lambda x: functional.cross_entropy(x, target, ignore_index=IGNORED),
    ):
        local = logits.clone().requires_grad_()
        loss = loss_of(local)
        assert torch.isnan(loss)
        torch.where(torch.tensor(True), 0.0, loss * 0.0).backward()
        assert local.grad is not None
        assert not local.grad.any()


def check_embedding() -> None:
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    for padding in (-1, 3):
        torch.manual_seed(4)
        table = torch.randn(CLASSES, WIDTH, dtype=torch.float64)
        ids = torch.randint(CLASSES, (2, TOKENS))
        ids[0, 0] = 3
        cotangent = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64)
        whole = table.clone().requires_grad_()
        expected = functional.embedding(ids, whole, None if padding < 0 else padding)
        expected.backward(cotangent)
        local = mine(table, 0).clone().requires_grad_()
        part = ops.vocab_embedding(local, ids, padding, ranks, group)
        part.backward(cotangent.mT.contiguous().mT)
        total = part.detach().clone()
        dist.all_reduce(total)
        close(total, expected.detach(), torch.float64)
        assert whole.grad is not None
        close(local.grad, mine(whole.grad, 0), torch.float64)


def run_checks() -> str:
    check_losses()
    check_no_target()
    check_embedding()
    group: Any = dist.group.WORLD.group_name
    try:
        ops.vocab_embedding(torch.zeros(2, 3), torch.tensor([99]), -1, dist.get_world_size(), group)
    except IndexError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ranks", [4])
def test_equals_torch(ranks: int) -> None:
    messages = run_on_ranks(run_checks, ranks, timeout_seconds=90)
    assert messages == [f"index 99 is out of range for {2 * ranks} entries"] * ranks


def test_shapes_on_fake_tensors() -> None:
    with FakeTensorMode():
        logits = torch.empty(TOKENS, CLASSES // 4, requires_grad=True)
        target = torch.empty(TOKENS, dtype=torch.int64)
        loss = ops.vocab_cross_entropy(logits, target, IGNORED, 0.0, 4, "no such group")
        loss.backward()
        assert loss.shape == ()
        assert logits.grad is not None
        table = torch.empty(4, WIDTH, requires_grad=True)
        found = ops.vocab_embedding(table, torch.empty(2, 3, dtype=torch.int64), -1, 4, "no group")
        found.sum().backward()
        assert found.shape == (2, 3, WIDTH)
        assert table.grad is not None
        assert table.grad.shape == table.shape
        part = ops.token_cross_entropy(logits, target, IGNORED, 4, "no such group")
        assert part.shape == ()
