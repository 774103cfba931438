"""A parameter's local part has the values, and its gradient the layout, of the parameter."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from autopar.mesh import Mesh
from autopar.runtime.local_part import local_part
from autopar.runtime.ranks import Ranks
from tests.warm_ranks import run_on_ranks


def test_a_plain_tensor_is_itself() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert local_part(weight) is weight


def gradients(transposed: bool) -> list[tuple[bool, bool]]:
    """For a sharded and a whole parameter: same values, same gradient as of `to_local`."""
    ranks = Ranks.create(Mesh(tp=2))
    torch.manual_seed(0)
    whole, found = torch.randn(4, 6), []
    for placement in (Shard(0), Replicate()):
        results = []
        for take in (local_part, DTensor.to_local):
            sharded = distribute_tensor(whole, ranks.device_mesh["tp"], [placement])
            parameter = torch.nn.Parameter(sharded)
            for _ in range(2):  # the second gradient is added to the first
                local = take(parameter)
                factor = torch.arange(local.numel(), dtype=torch.float32)
                factor = factor.view(local.shape[::-1]).t() if transposed else factor.view_as(local)
                (local * factor).sum().backward()
            results.append((local.detach(), parameter.grad))
        (ours, grad), (theirs, expected) = results
        assert isinstance(grad, DTensor) and grad.placements == expected.placements
        assert grad._spec.tensor_meta == expected._spec.tensor_meta
        found.append((torch.equal(ours, theirs), torch.equal(grad.to_local(), expected.to_local())))
    return found


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_are_those_of_to_local(transposed: bool) -> None:
    for found in run_on_ranks(gradients, 2, (transposed,), timeout_seconds=120):
        assert found == [(True, True)] * 2
