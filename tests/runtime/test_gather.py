"""Whole tensors come to rank 0 as copies (several stages and shards: test_state.py)."""

from __future__ import annotations

import torch
from torch.distributed.tensor import distribute_tensor

from autopar.mesh import Mesh
from autopar.runtime.gather import gather_to_first
from autopar.runtime.ranks import Ranks
from tests.warm_ranks import run_on_ranks


def test_copies(one_rank: Ranks) -> None:
    mine = torch.ones(2)
    found = gather_to_first({"a": mine}, one_rank)["a"]
    mine.zero_()
    assert found.tolist() == [1.0, 1.0]


def gathered() -> dict[str, list[float]]:
    ranks = Ranks.create(Mesh(pp=2))
    own = torch.full((2,), float(ranks.rank))
    both = torch.full((2,), float(ranks.rank + 5))
    placed = distribute_tensor(own, ranks.device_mesh["tp"])
    found = gather_to_first({f"own{ranks.rank}": placed, "both": both}, ranks)
    return {name: value.tolist() for name, value in found.items()}


def test_every_stage_and_the_first_of_several_holders() -> None:
    expected = {"own0": [0.0, 0.0], "both": [5.0, 5.0], "own1": [1.0, 1.0]}
    assert run_on_ranks(gathered, 2, timeout_seconds=60) == [expected, {}]
