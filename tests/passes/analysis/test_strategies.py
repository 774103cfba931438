"""Candidates and the placement problem: what is legal, and what it costs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.cost.collective import collective_time
from autopar.op_call import Bindings
from autopar.passes.analysis.blocks import analyse_blocks
from autopar.passes.analysis.strategies import (
    build_problem,
    candidates,
    local_call,
    move_seconds,
    searched,
    source_names,
)
from autopar.passes.capture import capture
from autopar.passes.rewrite.cut_blocks import cut_block
from autopar.placement import Partial, Replicate, ReplicatePartialGrad, Shard
from autopar.placement_problem import Problem
from autopar.program import TensorType
from tests.passes import toys

R, RG, P, S = Replicate, ReplicatePartialGrad, Partial, Shard


def problem(name: str, kind: str, ranks: int = 2, boundary: str = "R", **options: bool) -> Problem:
    graph, slots = toys.block(name, kind)
    return build_problem(
        [(kind, graph, slots)], toys.axis(ranks), toys.placement(boundary), 4.0, **options
    )


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


def test_names_in_the_problem_are_those_of_a_block() -> None:
    graph, slots = toys.block("mlp", "layers.0")
    names = source_names("a", graph, slots)
    assert names["p_layers_0_up_weight"] == "a|parameter layers.0.up.weight"
    assert names["embedding"] == "a|<embedding" and names["linear_1"] == "a|linear.1"
    assert len(set(names.values())) == len(names)


def test_a_parameter_of_two_blocks_is_stored_once() -> None:
    parts = [(k, *toys.block("tied", k)) for k in ("embed", "head")]
    made = build_problem(parts, toys.axis(), toys.placement("R"), 4.0)
    assert list(made.stored) == ["parameter embed.weight"]
    uses = [op.name for op in made.ops if op.reads == ("parameter embed.weight",)]
    assert uses == ["embed|parameter embed.weight", "head|parameter embed.weight"]


def test_sources_and_sinks() -> None:
    made = problem("mlp", "layers.0", boundary="S(1)")
    assert made.given["parameter layers.0.up.weight"] == (R, RG, S(0), S(1))
    assert made.given["layers.0|<embedding"] == (S(1),)
    assert made.sinks == {"layers.0|add": S(1)}
    assert made.stored["parameter layers.0.up.weight"] == 4.0
    weight = made.sizes["parameter layers.0.up.weight"]
    assert weight[S(0)] * 2 == weight[R] == 64 * 16 * 4


def test_split_weights_leaves_only_slices_of_matrices() -> None:
    made = problem("mlp", "layers.0", split_weights=True)
    assert made.given["parameter layers.0.up.weight"] == (S(0), S(1))
    assert R in made.given["parameter layers.0.up.bias"]


def test_a_parameter_is_never_resharded_but_its_gradient_may_be_summed() -> None:
    moves = problem("mlp", "layers.0").moves["layers.0|parameter layers.0.up.weight"]
    assert not [m for m in moves if m[0] != m[1] and "S" in (m[0].kind, m[1].kind)]
    assert moves[R, RG] > 0  # an all-reduce of its gradient


def test_the_price_of_moves() -> None:
    axis = toys.axis()
    value = TensorType((4, 8, 16), torch.float32, True)
    price = {
        k: collective_time(k, value.nbytes, 2, 1, axis.cluster)
        for k in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    }
    assert move_seconds(R, R, value, axis) == 0.0
    assert move_seconds(R, RG, value, axis) == price["all_reduce"]
    assert move_seconds(P, R, value, axis) == price["all_reduce"]
    assert move_seconds(S(1), RG, value, axis) == price["all_gather"] + price["reduce_scatter"]
    assert move_seconds(P, S(1), value, axis) == price["all_gather"] + price["reduce_scatter"]
    assert move_seconds(S(1), S(2), value, axis) == 2 * price["all_to_all"]
    assert move_seconds(RG, P, value, axis) is None
    odd = TensorType((3, 8), torch.float32, True)
    assert move_seconds(R, S(0), odd, axis) is None and move_seconds(R, S(5), odd, axis) is None
    ids = TensorType((4, 8), torch.int64, False)
    assert move_seconds(R, RG, ids, axis) == 0.0


def test_views_share_the_memory_of_their_root() -> None:
    made = problem("llama", "model.layers.0")
    roots = {k.split("|")[1]: v.split("|")[1] for k, v in made.roots.items() if "|" in v}
    assert roots["view"] == "linear" and roots["transpose"] == "linear"


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_choice_of_an_op_can_be_priced_and_sized(ranks: int) -> None:
    made = problem("llama", "model.layers.0", ranks)
    for op in made.ops:
        assert op.choices
        for choice in op.choices:
            assert choice.seconds >= 0 and len(choice.operands) == len(op.reads)
            assert choice.result in made.sizes[op.name]
            for value, wanted in zip(op.reads, choice.operands, strict=True):
                assert wanted in made.sizes[value]
