"""AdamW on the host equals torch's, whole and sharded; its moments are where they should be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autopar.runtime.host_optimizer import HostAdamW
from autopar.runtime.optimizer_state import load_optimizer_state, optimizer_state
from tests.warm_ranks import run_on_ranks

OPTIONS: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.2}
SHAPES = {"a": (7, 6), "v": (5,), "s": ()}
STEPS = 4


def values(seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}


def trained(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype, steps: int = STEPS
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    parameters = {n: nn.Parameter(v) for n, v in values(0, dtype).items()}
    optimizer: Any = kind(parameters.values(), **OPTIONS)  # type: ignore[call-arg]
    for step in range(steps):
        for name, gradient in values(step + 1, dtype).items():
            # One without a gradient is left alone, as torch does.
            parameters[name].grad = None if (name, step) == ("v", 0) else gradient
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_updates_as_torch_does(dtype: torch.dtype) -> None:
    (found, _), (expected, _) = trained(HostAdamW, dtype), trained(torch.optim.AdamW, dtype)
    most = 1e-2 if dtype == torch.bfloat16 else 1e-6
    for name, parameter in expected.items():
        torch.testing.assert_close(found[name], parameter, rtol=most, atol=most)
        assert found[name].dtype == dtype


def on_ranks() -> tuple[dict[str, torch.Tensor], dict[str, list[int]]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("replica",))

    def shared(whole: torch.Tensor) -> DTensor:
        return distribute_tensor(whole, mesh, [Shard(0)])

    names = ("a", "v")
    whole = values(0, torch.float32)
    held = {n: nn.Parameter(shared(whole[n])) for n in names}
    optimizer = HostAdamW(held.values(), **OPTIONS)
    for step in range(STEPS):
        for name, gradient in values(step + 1, torch.float32).items():
            if name in held:
                held[name].grad = None if (name, step) == ("v", 0) else shared(gradient)
        optimizer.step()
    sizes = {}
    for name, parameter in held.items():
        states = [s for s in optimizer.state[parameter].values() if isinstance(s, DTensor)]
        assert all(s.placements == parameter.placements for s in states)
        sizes[name] = [s.to_local().numel() for s in states]
    return {n: p.detach().full_tensor() for n, p in held.items()}, sizes


def test_shards_are_updated_as_whole_parameters() -> None:
    expected, _ = trained(torch.optim.AdamW, torch.float32)
    ranks = run_on_ranks(on_ranks, 2)
    for found, _ in ranks:
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name].detach(), rtol=1e-6, atol=1e-6)
    assert [sizes["a"] for _, sizes in ranks] == [[24, 24], [18, 18]]


@pytest.mark.parametrize("first", [torch.optim.AdamW, HostAdamW])
def test_checkpoints_are_those_of_adamw(first: type[torch.optim.Optimizer]) -> None:
    """Half of the steps with one, the rest with the other."""
    second = HostAdamW if first is torch.optim.AdamW else torch.optim.AdamW
    parameters, optimizer = trained(first, torch.float32, steps=2)
    saved = optimizer_state(optimizer, parameters)
    other: Any = second(parameters.values(), **OPTIONS)  # type: ignore[call-arg]
    load_optimizer_state(other, parameters, saved)
    for step in range(2, STEPS):
        for name, gradient in values(step + 1, torch.float32).items():
            parameters[name].grad = gradient
        other.step()
    expected, _ = trained(torch.optim.AdamW, torch.float32)
    for name, parameter in expected.items():
        torch.testing.assert_close(parameters[name], parameter, rtol=1e-6, atol=1e-6)


def test_a_moment_that_was_loaded_elsewhere_is_brought_to_the_host() -> None:
    parameters, optimizer = trained(HostAdamW, torch.float32)
    other = HostAdamW(parameters.values(), host="meta", **OPTIONS)
    load_optimizer_state(other, parameters, optimizer_state(optimizer, parameters))
    parameters["a"].grad = torch.ones_like(parameters["a"])
    with pytest.raises(NotImplementedError):  # nothing comes back from meta
        other.step()
    moments = other.state[parameters["a"]]
    assert moments["exp_avg"].is_meta and moments["exp_avg_sq"].is_meta


def test_a_closure_gives_the_loss() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = HostAdamW([parameter], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    assert optimizer.step(closure) == 3 and (parameter < 1).all()
