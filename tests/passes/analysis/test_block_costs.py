"""The price of a rewritten block is the sum over its graph."""

from __future__ import annotations

import pytest
from torch import fx

from autopar.block_cost import BlockCost, Tied
from autopar.cost.collective import collective_time
from autopar.parts import Slot
from autopar.passes.analysis.block_costs import block_cost
from autopar.passes.analysis.block_memory import block_memory
from autopar.passes.analysis.flops import graph_flops
from autopar.passes.analysis.roofline import roofline
from autopar.passes.rewrite.insert_collectives import insert_collectives
from autopar.passes.rewrite.localize_shapes import localize_shapes
from autopar.passes.rewrite.place import place
from tests.passes import toys

KIND = "layers.0"
HIDDEN = 4 * toys.BATCH * toys.SEQUENCE * toys.WIDTH


def rewritten(chosen: dict[str, str], ranks: int) -> tuple[fx.GraphModule, tuple[Slot, ...]]:
    graph, slots = toys.block("mlp", KIND)
    place(KIND, graph, slots, chosen, toys.placement("R"), ranks)
    if ranks > 1:
        insert_collectives(graph, toys.placement("R"), ranks)
    localize_shapes(graph, ranks)
    return graph, slots


def price(chosen: dict[str, str], ranks: int, tied: dict[str, str] | None = None) -> BlockCost:
    graph, slots = rewritten(chosen, ranks)
    return block_cost("b", KIND, graph, slots, toys.axis(ranks), tied or {})


def test_one_rank_has_no_communication_and_all_parameters() -> None:
    cost = price({}, 1)
    assert cost.forward_comm == cost.backward_comm == cost.parameter_reduce_seconds == 0.0
    width = toys.WIDTH
    assert cost.parameters == cost.trainable == 2 * width + 2 * 4 * width * width + 5 * width
    assert cost.input_bytes == cost.boundary_bytes == HIDDEN
    assert cost.tied == ()


def test_the_price_is_the_sum_over_the_graph() -> None:
    graph, slots = rewritten(toys.MEGATRON, 2)
    text = graph.code
    cost = block_cost("b", KIND, graph, slots, toys.axis(2), set())
    prices = [p for p in roofline(graph, toys.axis(2)) if p.cost.bound != "communication"]
    assert cost.forward_compute == pytest.approx(sum(p.cost.forward_seconds for p in prices))
    assert cost.backward_compute == pytest.approx(sum(p.cost.backward_seconds for p in prices))
    weights = sum(p.cost.weight_seconds for p in prices)
    assert cost.backward_weights == pytest.approx(weights)
    assert 0 < cost.backward_weights < cost.backward_compute
    assert cost.flops == sum(f + b for f, b in graph_flops(graph).values())
    memory = block_memory(graph, slots)
    assert (cost.saved_bytes, cost.input_bytes) == (memory.saved, memory.inputs)
    assert cost.transient_bytes == memory.transient + memory.shared
    assert graph.code == text


def test_megatron_pays_one_all_reduce_each_way() -> None:
    cost = price(toys.MEGATRON, 2)
    seconds = collective_time("all_reduce", HIDDEN, 2, 1, toys.axis(2).cluster)
    assert (cost.forward_comm, cost.backward_comm) == (pytest.approx(seconds),) * 2


def test_parameters_are_counted_as_a_rank_holds_them() -> None:
    whole, local = price({}, 1), price(toys.MEGATRON, 2)
    width = toys.WIDTH
    assert local.parameters == whole.parameters - (2 * 4 * width * width + 4 * width) // 2


def test_frozen_parameters_are_held_but_not_trained() -> None:
    graph, slots = rewritten({}, 1)
    up = next(n for n in graph.graph.nodes if n.name == "p_layers_0_up_weight")
    up.meta["requires_grad"] = False
    cost = block_cost("b", KIND, graph, slots, toys.axis(1), set())
    assert cost.parameters - cost.trainable == 64 * 16


def test_partial_gradients_of_parameters_are_summed_once() -> None:
    cost = price(
        {"parameter norm.weight": "R*", "parameter norm.bias": "R*", "layer_norm": "replicate*"}, 2
    )
    nbytes = 2 * toys.WIDTH * 4
    assert cost.parameter_reduce_seconds == collective_time(
        "all_reduce", nbytes, 2, 1, toys.axis(2).cluster
    )


def test_tied_parameters() -> None:
    up, down, bias = (f"layers.0.{n}" for n in ("up.weight", "down.weight", "up.bias"))
    tied = price({}, 1, {up: "one", down: "two", bias: "one"})
    assert set(tied.tied) == {
        Tied("one", 64 * 16 + 64, 64 * 16 + 64, ((64, 16), (64,))),
        Tied("two", 64 * 16, 64 * 16, ((16, 64),)),
    }
    assert tied.tied_parameters == 2 * 64 * 16 + 64 and tied.tied_as("three") == Tied("three", 0, 0)
    assert price({}, 1, {"other": "one"}).tied == ()
