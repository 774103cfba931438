"""A module marked from outside stays whole under tensor parallelism, and only that one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.second = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.first(x)
        return first + self.second(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def make_plan(model: nn.Module) -> autopar.Plan:
    return autopar.plan(
        model,
        "cpu:2",
        example_inputs={"x": torch.randn(4, 8)},
        global_batch_size=4,
        pins="tp=2,weights=split",
    )


def split_parameters(plan: autopar.Plan) -> set[str]:
    return {
        f"{kind}.{name.removeprefix('parameter ')}"
        for kind, placements in plan.placements.items()
        for name, placement in placements.items()
        if name.startswith("parameter ") and placement.startswith("S(")
    }


def sharded_ops(plan: autopar.Plan, kind: str) -> set[str]:
    return {n for n, s in plan.placements[kind].items() if s.startswith("shard") and "linear" in n}


def test_only_the_marked_module_stays_whole() -> None:
    model = Model()
    plain = make_plan(model)
    assert sharded_ops(plain, "layers.0") == {"linear", "linear.1", "linear.2", "linear.3"}
    layer = model.layers[1]
    assert isinstance(layer, Layer)
    assert autopar.replicate(layer.first) is layer.first
    marked = make_plan(model)
    # The two layers are no longer of one kind.
    assert sharded_ops(marked, "layers.0") == {"linear", "linear.1", "linear.2", "linear.3"}
    assert sharded_ops(marked, "layers.1") == {"linear.2", "linear.3"}
    placements = dict(marked.placements["layers.1"])
    placements["linear"] = "shard n"
    edited = {**marked.to_dict(), "placements": {**marked.placements, "layers.1": placements}}
    with pytest.raises(AutoparError, match=r"op 'linear': strategy 'shard n' is not legal"):
        autopar.launch(_compile, 2, edited)


def _compile(plan: dict[str, object]) -> None:
    model = Model()
    layer = model.layers[1]
    assert isinstance(layer, Layer)
    autopar.replicate(layer.first)
    autopar.compile(
        model,
        example_inputs={"x": torch.randn(4, 8)},
        global_batch_size=4,
        plan=autopar.Plan.from_dict(plan),
        timeout_seconds=30,
    )


def test_a_marked_model_is_whole() -> None:
    plan = make_plan(autopar.replicate(Model()))
    assert not sharded_ops(plan, "layers.0")
