"""Experts split over real ranks: tokens whole on each, the ranks' results add up."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar.runtime import collectives  # noqa: F401 - registers the op
from tests.runtime.expert_operands import Whole, mine
from tests.warm_ranks import run_on_ranks


def check(kind: str) -> None:
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    whole = Whole.make(kind)
    expected, wanted = whole.run()
    tokens = [t.detach().clone().requires_grad_(t.requires_grad) for t in whole.tokens]
    own = [mine(t) for t in whole.parameters]
    result = torch.ops.autopar.own_experts(*tokens, *own, *whole.rest, ranks, group)
    leaves = [t for t in (*tokens, *own) if t is not None and t.requires_grad]
    found = list(torch.autograd.grad(result, leaves, whole.seed))
    total = result.detach().clone()
    for term in (total, *found[:2]):
        dist.all_reduce(term)
    torch.testing.assert_close(total, expected)
    for got, grad in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(got, grad)
    for got, grad in zip(found[2:], wanted[2:], strict=True):
        torch.testing.assert_close(got, mine(grad))


@pytest.mark.parametrize("kind", ["even", "skewed"])
def test_terms_and_gradients_on_two_ranks(kind: str) -> None:
    run_on_ranks(check, 2, (kind,))


def test_on_meta_no_group_is_asked_for() -> None:
    whole = Whole.make("even")
    given = [t.to("meta") if t is not None else None for t in (*whole.tokens, *whole.parameters)]
    result = torch.ops.autopar.own_experts(*given, *whole.rest, 2, "tp")
    assert result.is_meta and result.shape == whole.tokens[0].shape
