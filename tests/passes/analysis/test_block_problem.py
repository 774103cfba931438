"""The placement problem of a block: what is legal, and what it costs."""

from __future__ import annotations

import pytest
import torch

from autopar.cost.collective import collective_time
from autopar.passes.analysis.block_problem import (
    build_problem,
    move_seconds,
    source_names,
)
from autopar.passes.analysis.candidates import candidates
from autopar.placement import Partial, Replicate, ReplicatePartialGrad, Shard
from autopar.placement_problem import Problem
from autopar.program import TensorType
from tests.passes import toys

R, RG, P, S = Replicate, ReplicatePartialGrad, Partial, Shard


def problem(name: str, kind: str, ranks: int = 2, boundary: str = "R", **options: bool) -> Problem:
    graph, slots = toys.block(name, kind)
    return build_problem(
        [(kind, graph, slots, candidates(graph, ranks))],
        toys.axis(ranks),
        toys.placement(boundary),
        4.0,
        **options,
    )


def test_names_in_the_problem_are_those_of_a_block() -> None:
    graph, slots = toys.block("mlp", "layers.0")
    names = source_names("a", graph, slots)
    assert names["p_layers_0_up_weight"] == "a|parameter layers.0.up.weight"
    assert names["embedding"] == "a|<embedding" and names["linear_1"] == "a|linear.1"
    assert len(set(names.values())) == len(names)


def test_a_parameter_of_two_blocks_is_stored_once() -> None:
    blocks = {k: toys.block("tied", k) for k in ("embed", "head")}
    parts = [(k, *block, candidates(block[0], 2)) for k, block in blocks.items()]
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
