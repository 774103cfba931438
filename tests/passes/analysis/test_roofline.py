"""What bounds each op, from its shapes and the device alone."""

from __future__ import annotations

from autopar.cost.collective import collective_time
from autopar.op_call import Bindings
from autopar.passes.analysis.flops import graph_flops
from autopar.passes.analysis.roofline import roofline
from autopar.passes.rewrite.cut_blocks import cut_block
from autopar.passes.rewrite.insert_collectives import insert_collectives
from autopar.passes.rewrite.localize_shapes import localize_shapes
from autopar.passes.rewrite.place import place
from tests.passes import toys


def test_small_ops_wait_for_their_launch_and_views_are_free() -> None:
    graph, _ = toys.block("llama", "model.layers.0")
    prices = {p.node: p for p in roofline(graph, toys.axis())}
    assert prices["linear"].cost.bound == "launch" and prices["add_8"].cost.bound == "launch"
    assert prices["transpose"].trivial and prices["transpose"].cost.forward_seconds == 0.0
    assert prices["linear"].path.endswith("self_attn.q_proj") and prices["linear"].op == "linear"


def test_large_products_are_bound_by_arithmetic_and_sums_by_memory() -> None:
    program = toys.simplified("llama")
    sizes = {"batch": 64, "sequence": 2**16}
    found = toys.blocks("llama").block("model.layers.0")
    graph, _ = cut_block(program, found, Bindings(program.symbols, sizes))
    prices = {p.node: p for p in roofline(graph, toys.axis())}
    # Attention over many keys is arithmetic, and so are narrow products without matrix units.
    assert prices["scaled_dot_product_attention"].cost.bound == "compute"
    assert prices["linear"].cost.bound == "compute"
    assert prices["add_8"].cost.bound == "memory" and prices["silu"].cost.bound == "memory"


def test_flops_are_those_of_the_flops_analysis() -> None:
    graph, _ = toys.block("llama", "model.layers.0")
    flops = {n.name: f for n, f in graph_flops(graph).items()}
    for price in roofline(graph, toys.axis()):
        assert (price.cost.forward_flops, price.cost.backward_flops) == flops[price.node]


def test_collectives_are_bound_by_communication_and_the_graph_is_not_changed() -> None:
    graph, slots = toys.block("mlp", "layers.0")
    place("layers.0", graph, slots, toys.MEGATRON, toys.placement("R"), 2)
    insert_collectives(graph, toys.placement("R"), 2)
    localize_shapes(graph, 2)
    text = graph.code
    axis = toys.axis(2)
    prices = roofline(graph, axis)
    names = [p.op for p in prices if p.cost.bound != "communication"]
    assert names == ["layer_norm", "linear", "gelu", "linear", "add"]
    moves = [p for p in prices if p.cost.bound == "communication"]
    assert sorted(p.op for p in moves if p.op) == ["all_reduce", "all_reduce"]
    nbytes = graph.graph.find_nodes(op="placeholder")[-1].meta["val"].nbytes
    seconds = collective_time("all_reduce", nbytes, 2, 1, axis.cluster)
    assert sum(p.cost.forward_seconds for p in moves) == seconds
    assert sum(p.cost.backward_seconds for p in moves) == seconds
    assert graph.code == text
