"""Rows of causal attention on ranks are the rows of the whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from autopar.runtime import collectives  # noqa: F401 - registers the ops
from tests.warm_ranks import run_on_ranks

rows = torch.ops.autopar.attention_rows
Tensor = torch.Tensor


def check() -> None:
    """The results, and gradients summed over ranks for the keys and values that all hold."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    name = dist.group.WORLD.group_name
    for grouped, scale in ((False, None), (True, 0.3)):
        torch.manual_seed(0)
        heads = 2 if grouped else 4
        q, k, v = (
            torch.randn(2, h, 8, e, dtype=torch.float64, requires_grad=True)
            for h, e in ((4, 6), (heads, 6), (heads, 5))
        )
        whole = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=grouped
        )
        weights = torch.arange(float(whole.numel()), dtype=whole.dtype).view_as(whole).sin()
        expected = torch.autograd.grad((whole * weights).sum(), (q, k, v))
        mine = q.detach().chunk(ranks, 2)[rank].requires_grad_()
        found = rows(mine, k, v, scale, grouped, ranks, name)
        torch.testing.assert_close(found, whole.chunk(ranks, 2)[rank])
        loss = (found * weights.chunk(ranks, 2)[rank]).sum()
        own, *shared = torch.autograd.grad(loss, (mine, k, v))
        torch.testing.assert_close(own, expected[0].chunk(ranks, 2)[rank])
        for gradient, want in zip(shared, expected[1:], strict=True):
            dist.all_reduce(gradient)
            torch.testing.assert_close(gradient, want)


@pytest.mark.parametrize("ranks", [2, 4])
def test_rows_are_those_of_the_whole(ranks: int) -> None:
    run_on_ranks(check, ranks)


def test_shapes_follow_without_a_group() -> None:
    q, k, v = (torch.empty(1, 2, n, e, device="meta") for n, e in ((4, 6), (8, 6), (8, 5)))
    assert rows(q, k, v, None, False, 2, "cp").shape == (1, 2, 4, 5)
