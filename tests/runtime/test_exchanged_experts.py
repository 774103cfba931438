"""Experts and tokens split over real ranks: each rank's tokens and experts get what is theirs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from autopar.runtime import collectives  # noqa: F401 - registers the op
from tests.runtime.expert_operands import EXPERTS, TOKENS, Whole, mine
from tests.warm_ranks import run_on_ranks


def check(kind: str) -> None:
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    whole = Whole.make(kind)
    expected, wanted = whole.run()
    own = [mine(t) for t in (*whole.tokens, *whole.parameters)]
    result = torch.ops.autopar.exchanged_experts(*own, *whole.rest, ranks, group)
    leaves = [t for t in own if t is not None and t.requires_grad]
    found = torch.autograd.grad(result, leaves, mine(whole.seed))
    torch.testing.assert_close(result.detach(), mine(expected))
    for got, grad in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, mine(grad))


@pytest.mark.parametrize("kind", ["even", "skewed", "dropped"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_equal_to_one_device(ranks: int, kind: str) -> None:
    run_on_ranks(check, ranks, (kind,))


def wrong_index() -> str:
    whole = Whole.make("even")
    whole.tokens[1][:] = EXPERTS
    own = [mine(t) for t in (*whole.tokens, *whole.parameters)]
    group = dist.group.WORLD.group_name
    try:
        torch.ops.autopar.exchanged_experts(*own, *whole.rest, dist.get_world_size(), group)
    except IndexError as error:
        return str(error)
    return ""


def test_an_expert_that_there_is_not() -> None:
    for said in run_on_ranks(wrong_index, 2):
        assert f"there are {EXPERTS}" in said


def test_on_meta_it_keeps_even_rows() -> None:
    whole = Whole.make("even")
    own = [t[: len(t) // 2].detach().to("meta") for t in (*whole.tokens, *whole.parameters)]
    own = [t.requires_grad_(t.is_floating_point()) for t in own]
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        result = torch.ops.autopar.exchanged_experts(*own, *whole.rest, 2, "tp")
    assert result.is_meta and result.shape == own[0].shape
    # Half of the tokens, twice each: as many rows come in as go out.
    rows = {len(t) for t in kept if t.dim() == 2 and t.shape[1] == own[0].shape[1]}
    assert TOKENS in rows
