"""Sharding candidates: what is legal for an op, and what one rank sees of it."""

from __future__ import annotations

import torch
from torch import nn

from autopar.op_call import Bindings
from autopar.passes.analysis.blocks import analyse_blocks
from autopar.passes.analysis.candidates import candidates, local_call, ruled_calls, searched
from autopar.passes.capture import capture
from autopar.passes.rewrite.cut_blocks import cut_block
from tests.passes import toys


def test_candidates_cover_every_op_and_name_the_unknown() -> None:
    graph, _ = toys.block("mlp", "layers.0")
    text = graph.code
    found = candidates(graph, 2)
    assert set(found.strategies) == {"layer_norm", "linear", "gelu", "linear_1", "add"}
    assert found.unknown == () and graph.code == text

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i0(self.inner(x)).sum()

    program = capture(Odd(), {"x": torch.ones(4, 4)})
    block = next(
        b for b in analyse_blocks(program).chain if any("special_i0" in n.name for n in b.nodes)
    )
    graph, _ = cut_block(program, block, Bindings(program.symbols, program.sizes))
    found = candidates(graph, 2)
    assert found.unknown == ("aten.special_i0.default",)
    assert [s.name for s in found.strategies["special_i0"]] == ["replicate"]


def test_a_local_call_has_the_types_of_a_rank() -> None:
    graph, _ = toys.block("mlp", "layers.0")
    found = candidates(graph, 2)
    strategy = next(s for s in found.strategies["linear"] if s.name == "shard n")
    local = local_call(found.calls["linear"], strategy, 2)
    assert [t.shape for t in local.types] == [(4, 8, 16), (32, 16), (32,)]
    assert local.result.shape == (4, 8, 32)


def test_a_product_that_can_be_split_is_not_replicated() -> None:
    graph, _ = toys.block("mlp", "layers.0")
    found = candidates(graph, 2)
    for node in ("linear", "linear_1"):
        names = [s.name for s in searched(found.calls[node], found.strategies[node])]
        assert names and all(n.startswith("shard") for n in names)
    legal = found.strategies["gelu"]
    assert searched(found.calls["gelu"], legal) == legal


def test_prices_are_kept_and_are_those_of_the_searched_strategies() -> None:
    graph, _ = toys.block("mlp", "layers.0")
    found = candidates(graph, 2, ruled_calls(graph))
    device = toys.axis().cluster.device
    prices = found.prices("linear", device)
    assert prices is found.prices("linear", device)
    whole = candidates(graph, 1).prices("linear", device)[0].cost
    for strategy, local, cost in prices:
        assert strategy.name.startswith("shard")
        assert local == local_call(found.calls["linear"], strategy, 2)
        assert cost.forward_flops == whole.forward_flops / 2
