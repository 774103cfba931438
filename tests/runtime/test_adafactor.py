"""Adafactor over shards and pieces equals torch's on whole parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from autopar.errors import PlanError
from autopar.runtime.adafactor import Adafactor
from tests.warm_ranks import run_on_ranks

STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 0.3, "weight_decay": 0.1, "d": 1.5}
Whole = dict[str, torch.Tensor]
# Of the whole parameters; rows that do not divide, three dims, vectors.
SHAPES = {"a": (7, 6), "b": (8, 6), "v": (5,), "e": (4, 3, 5), "w": (6, 10), "u": (8, 4), "t": (6,)}
# What ranks hold: whole or a piece (dim, start, stop), split over a mesh of 2 x 2.
HELD: dict[str, tuple[tuple[Placement, Placement], tuple[int, int, int] | None]] = {
    "a": ((Shard(0), Shard(1)), None),
    "b": ((Replicate(), Shard(0)), None),
    "v": ((Shard(0), Replicate()), None),
    "e": ((Shard(0), Shard(2)), None),
    "w[:, 0:4]": ((Shard(0), Shard(1)), (1, 0, 4)),
    "w[:, 4:10]": ((Shard(0), Replicate()), (1, 4, 10)),
    "u[0:2]": ((Shard(1), Shard(0)), (0, 0, 2)),
    "u[2:8]": ((Shard(1), Shard(0)), (0, 2, 8)),
    "t[0:2]": ((Shard(0), Replicate()), (0, 0, 2)),
    "t[2:6]": ((Replicate(), Shard(0)), (0, 2, 6)),
}


def values(seed: int) -> Whole:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator) * (1 + len(n)) for n, s in SHAPES.items()}


def piece_of(name: str, whole: Whole) -> torch.Tensor:
    piece = HELD[name][1]
    value = whole[name.split("[")[0]]
    return value if piece is None else value.narrow(piece[0], piece[1], piece[2] - piece[1])


def on_ranks() -> tuple[Whole, dict[str, list[int]]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))

    def shared(name: str, whole: Whole) -> DTensor:
        return distribute_tensor(piece_of(name, whole).contiguous(), mesh, HELD[name][0])

    held = {name: nn.Parameter(shared(name, values(0))) for name in HELD}
    optimizer = Adafactor(held.items(), **OPTIONS)
    for step in range(STEPS):
        for name, parameter in held.items():
            parameter.grad = shared(name, values(step + 1))
        optimizer.step()
    full = {n: p.detach().full_tensor() for n, p in held.items()}
    sizes = {
        n: [s.to_local().numel() for s in optimizer.state[p].values() if isinstance(s, DTensor)]
        for n, p in held.items()
    }
    return full, sizes


def one_device() -> Whole:
    parameters = {n: nn.Parameter(v) for n, v in values(0).items()}
    optimizer = torch.optim.Adafactor(parameters.values(), **OPTIONS)
    for step in range(STEPS):
        for name, gradient in values(step + 1).items():
            parameters[name].grad = gradient
        optimizer.step()
    return {n: p.detach() for n, p in parameters.items()}


def test_shards_and_pieces_are_updated_as_whole_parameters() -> None:
    expected = one_device()
    before = values(0)
    for full, sizes in run_on_ranks(on_ranks, 4, timeout_seconds=100):
        for name in HELD:
            wanted = piece_of(name, expected)
            torch.testing.assert_close(full[name], wanted, rtol=2e-5, atol=1e-6)
            assert not torch.allclose(wanted, piece_of(name, before), rtol=0.01)
        # Means of rows and of columns, each sharded as the dim that is left.
        assert sizes["b"] == [4, 6] and sizes["w[:, 4:10]"] == [3, 6]
        assert sizes["a"] in ([4, 3], [3, 3]) and sizes["e"] in ([6, 6], [6, 4])


def test_plain_parameters_are_updated_as_by_torch() -> None:
    parameters = {n: nn.Parameter(v) for n, v in values(0).items()}
    optimizer = Adafactor(parameters.values(), **OPTIONS)
    for step in range(STEPS):
        for name, gradient in values(step + 1).items():
            parameters[name].grad = gradient

        def loss() -> float:
            assert torch.is_grad_enabled()
            return 2.0

        assert optimizer.step(loss) == 2.0
    for name, wanted in one_device().items():
        torch.testing.assert_close(parameters[name].detach(), wanted, rtol=1e-5, atol=1e-6)


def test_a_parameter_without_gradient_stays() -> None:
    used, unused = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    optimizer = Adafactor([used, unused])
    used.grad = torch.ones(3, 2)
    optimizer.step()
    assert not torch.equal(used, unused) and torch.equal(unused, torch.ones(3, 2))
    assert not optimizer.state[unused]


def test_a_piece_without_gradient_is_a_part_of_zeros() -> None:
    whole = nn.Parameter(torch.ones(3, 4))
    whole.grad = torch.cat([torch.ones(3, 2), torch.zeros(3, 2)], 1)
    torch.optim.Adafactor([whole]).step()
    left, right = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    left.grad = torch.ones(3, 2)
    Adafactor([("w[:, 0:2]", left), ("w[:, 2:4]", right)]).step()
    torch.testing.assert_close(torch.cat([left, right], 1), whole)


def pieces_split_in_different_ways() -> str:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    first = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
    second = nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(1)]))
    with pytest.raises(PlanError) as error:
        Adafactor([("m.w[:, 0:2]", first), ("m.w[:, 2:4]", second)])
    return str(error.value)


def test_pieces_split_in_different_ways_are_refused() -> None:
    for text in run_on_ranks(pieces_split_in_different_ways, 2, timeout_seconds=100):
        assert "'m.w'" in text and "m.w[:, 0:2]" in text and "tp=1" in text
