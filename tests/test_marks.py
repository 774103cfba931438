"""A module marked from outside stays whole under tensor parallelism, and only that one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api import prepared, rewrite_for
from autopar.errors import AutoparError
from autopar.program import module_paths
from tests.warm_ranks import run_on_ranks


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
        run_on_ranks(_compile, 2, (edited,))


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


class Attention(nn.Module):
    """A fused projection into queries, keys and values, by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        out: Tensor = self.out(torch.sigmoid(q) * k + v)
        return out


def test_no_collective_stands_inside_a_marked_module() -> None:
    """Whatever the plan does around it: its values are whole from its first op to its last."""
    model = Model()
    model.layers[0].first = Attention()  # type: ignore[union-attr]
    autopar.replicate(model.layers[0].first)  # type: ignore[arg-type]
    inputs = {"x": torch.randn(4, 8)}
    plan = make_plan(model)
    parts = rewrite_for(prepared(model, inputs, plan), plan)
    graph = parts.graphs["layers.0"].graph
    inside = [n for n in graph.nodes if "layers.0.first" in module_paths(n)]
    ops = [n for n in inside if "strategy" in n.meta]
    assert len(ops) >= 5 and sum(n.name.startswith("linear") for n in ops) == 2
    for node in ops:
        assert node.meta["placement"].is_whole, node
        moved = [s for s in node.all_input_nodes if s in inside and "reshard" in s.meta]
        made_inside = [s for s in moved if "layers.0.first" in module_paths(s.args[0])]
        assert not made_inside, (node, made_inside)
    outside = [n for n in graph.nodes if "layers.0.second" in module_paths(n)]
    assert any("strategy" in n.meta and not n.meta["placement"].is_whole for n in outside)
