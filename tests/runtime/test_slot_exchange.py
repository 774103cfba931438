"""Rows moved between ranks: every slot gets what it is to get, whoever holds which part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from autopar.mesh import Mesh
from autopar.runtime.ranks import Ranks
from autopar.runtime.slot_exchange import OwnSlots, local_tensor, moved
from tests.warm_ranks import run_on_ranks

OWN, WIDTH = 3, 4
# Slot 1 goes to both ranks, slots 0 and 3 nowhere, one slot stays empty, and there is one more.
SOURCE = (1, 4, -1, 5, 1, 2, 4, 1)


def whole() -> torch.Tensor:
    return torch.arange(2.0 * OWN * WIDTH).view(2 * OWN, WIDTH) + 1


def expected() -> torch.Tensor:
    rows = [whole()[s] if s >= 0 else torch.zeros(WIDTH) for s in SOURCE]
    return torch.stack(rows)


def on_tp(ranks: Ranks) -> DTensor:
    local = whole().chunk(2)[ranks.index("tp")].clone()
    return DTensor.from_local(local, ranks.tp, [Shard(0)], run_check=False)


def move() -> torch.Tensor:
    ranks = Ranks.create(Mesh(tp=2), device="cpu")
    return moved(on_tp(ranks), SOURCE, OWN, "tp", ranks)


def test_two_ranks() -> None:
    found = run_on_ranks(move, 2, ())
    assert torch.equal(torch.cat(found), expected())


def move_shards() -> tuple[Any, ...]:
    """Of four ranks, two share the slots of each rank of tp; FSDP2 gives them two and one."""
    ranks = Ranks.create(Mesh(dp=2, tp=2), device="cpu")
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(on_tp(ranks))
    fully_shard(module, mesh=ranks.shards)
    weight = module.weight
    assert isinstance(weight, DTensor)
    held = OwnSlots.of(weight, OWN, "tp")
    local = local_tensor(weight)
    some = held.rows(local, [2, 0])
    gathered = held.gathered(local)
    there = moved(weight, SOURCE, OWN, "tp", ranks)
    held.add(local, [0, 2, 2], torch.ones(3, WIDTH))
    held.put(local, [1], torch.zeros(1, WIDTH))
    return (held.start, held.stop), some, gathered, there, held.gathered(local)


def test_ranks_that_share_slots() -> None:
    found = run_on_ranks(move_shards, 4, ())
    assert [own for own, *_ in found] == [(0, 2), (0, 2), (2, 3), (2, 3)]
    for rank, (_, some, gathered, _, changed) in enumerate(found):
        mine = whole().chunk(2)[rank % 2]
        assert torch.equal(gathered, mine) and torch.equal(some, mine[[2, 0]])
        assert torch.equal(changed, torch.stack([mine[0] + 1, mine[1] * 0, mine[2] + 2]))
    for tp in (0, 1):
        parts = torch.cat([found[tp][3], found[2 + tp][3]])
        assert torch.equal(parts, expected().chunk(2)[tp])


def split_otherwise() -> tuple[int, int]:
    """A dim that does not count slots, split by ranks of a mesh's first dim."""
    ranks = Ranks.create(Mesh(dp=2), device="cpu")
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    tensor = DTensor.from_local(torch.ones(OWN, 2), mesh, [Shard(1), Shard(0)], run_check=False)
    assert ranks.mesh.dp == 2
    held = OwnSlots.of(tensor, OWN, "tp")
    return held.start, held.stop


def test_parts_of_every_slot() -> None:
    assert run_on_ranks(split_otherwise, 2, ()) == [(0, OWN)] * 2
