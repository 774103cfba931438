"""Whole values draw alike on tp ranks, shards draw their own, and all of it can be repeated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from autopar.mesh import Mesh
from autopar.runtime.random_state import RandomStream
from autopar.runtime.ranks import Ranks
from tests.warm_ranks import run_on_ranks


def drawn(group: str, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Whole, sharded, whole, sharded: as in a block with tensor parallelism."""
    ops = torch.ops.autopar
    found = {}
    for turn in range(2):
        found[f"whole {turn}"] = torch.dropout(x, 0.5, True)
        inside = torch.dropout(ops.own_random(x, group), 0.5, True)
        found[f"own {turn}"] = ops.same_random(inside, group)
    return found


def streams() -> dict[str, Any]:
    from autopar.runtime import collectives  # noqa: F401

    torch.manual_seed(5 + Ranks.create(Mesh(dp=2, tp=2)).rank)  # rank 0's seed is the run's
    found: dict[str, Any] = {}
    for run in ("first", "again"):
        torch.manual_seed(5)
        ranks = Ranks.create(Mesh(dp=2, tp=2))
        stream = RandomStream(ranks)
        before = torch.get_rng_state()
        x = torch.ones(64)
        for step in range(2):
            with stream.step():
                found[f"{run} {step}"] = drawn(ranks.group("tp").group_name, x)
                with stream.shared(0):
                    found[f"{run} {step}"]["shared"] = torch.rand(8)
                with stream.shared(0):
                    found[f"{run} {step}"]["shared next"] = torch.rand(8)
        found["untouched"] = torch.equal(before, torch.get_rng_state())
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_on_ranks(streams, 4, timeout_seconds=100)


def test_whole_values_are_equal_over_tp_and_shards_are_not(ranks: list[dict[str, Any]]) -> None:
    for step in range(2):
        values = [found[f"first {step}"] for found in ranks]  # dp0 tp0, dp0 tp1, dp1 tp0, dp1 tp1
        for turn in range(2):
            whole, own = ([v[f"{kind} {turn}"] for v in values] for kind in ("whole", "own"))
            assert torch.equal(whole[0], whole[1])
            assert torch.equal(whole[2], whole[3])
            assert not torch.equal(whole[0], whole[2])
            assert len({tuple(v.tolist()) for v in own}) == 4
        assert torch.equal(values[0]["shared"], values[1]["shared"])
        assert not torch.equal(values[0]["shared"], values[0]["shared next"])


def test_no_two_draws_are_the_same(ranks: list[dict[str, Any]]) -> None:
    values = [tuple(v.tolist()) for step in range(2) for v in ranks[0][f"first {step}"].values()]
    assert len(set(values)) == len(values)


def test_a_seed_repeats_a_run_and_the_users_generator_is_left_alone(
    ranks: list[dict[str, Any]],
) -> None:
    for found in ranks:
        assert found["untouched"]
        for step in range(2):
            first, again = found[f"first {step}"], found[f"again {step}"]
            assert all(torch.equal(first[name], again[name]) for name in first)


def test_recomputation_draws_the_same_numbers_again(one_rank: Ranks) -> None:
    from autopar.runtime import collectives  # noqa: F401

    group = one_rank.group("tp").group_name
    seen: list[torch.Tensor] = []

    def block(x: torch.Tensor) -> torch.Tensor:
        values = drawn(group, x)
        seen.append(torch.stack([v.detach() for v in values.values()]))
        return torch.stack([v.sin() for v in values.values()]).exp()

    with RandomStream(one_rank, 3).step():
        x = torch.ones(64, requires_grad=True)
        checkpoint(block, x, use_reentrant=False).sum().backward()
    assert len(seen) == 2
    assert torch.equal(seen[0], seen[1])


def test_fake_tensors_move_no_generator() -> None:
    from autopar.runtime import collectives  # noqa: F401

    state = torch.get_rng_state()
    with FakeTensorMode():
        assert torch.ops.autopar.own_random(torch.ones(3), "tp").shape == (3,)
    meta = torch.ones(3, device="meta")
    assert torch.ops.autopar.same_random(meta, "tp").shape == (3,)
    assert torch.equal(state, torch.get_rng_state())
