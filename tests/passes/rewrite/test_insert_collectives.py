"""The inserted ops are those of the reshard table, once for each value and placement."""

from __future__ import annotations

import pytest
from torch import fx
from torch.testing import FileCheck

from autopar.errors import PassError
from autopar.passes.rewrite.insert_collectives import insert_collectives, operands_of
from autopar.passes.rewrite.place import place
from tests.passes import toys

KIND = "layers.0"
SEQUENCE_PARALLEL = {
    **toys.MEGATRON,
    "parameter norm.weight": "R*",
    "parameter norm.bias": "R*",
    "layer_norm": "shard d1",
    "add": "shard d1",
    "parameter down.bias": "R",
}


def inserted(name: str, kind: str, chosen: dict[str, str], boundary: str = "R") -> fx.GraphModule:
    graph, slots = toys.block(name, kind)
    place(kind, graph, slots, chosen, toys.placement(boundary), 2)
    insert_collectives(graph, toys.placement(boundary), 2)
    return graph


def count(graph: fx.GraphModule, op: str) -> int:
    return sum(
        getattr(n.target, "_opname", "") == op and n.target.namespace == "autopar"
        for n in graph.graph.nodes
    )


def test_column_then_row_parallel_has_one_pair() -> None:
    graph = inserted("mlp", KIND, toys.MEGATRON)
    FileCheck().check("layer_norm").check_count("autopar.copy", 1, exactly=True).check(
        "linear"
    ).check("gelu").check("linear").check_count(
        "autopar.all_reduce.default", 1, exactly=True
    ).check("add").run(graph.code)
    # The bias of the row-parallel product is added on one rank.
    assert count(graph, "first_rank_only") == 1
    FileCheck().check("all_reduce.default(linear_1, 'tp')").run(graph.code)


def test_sequence_parallelism_gathers_and_scatters() -> None:
    graph = inserted("mlp", KIND, SEQUENCE_PARALLEL, "S(1)")
    FileCheck().check("layer_norm").check(
        "autopar.all_gather.default(layer_norm, 1, 2, 'tp')"
    ).check("gelu").check("autopar.reduce_scatter.default(linear_1, 1, 2, 'tp')").check("add").run(
        graph.code
    )
    assert count(graph, "all_reduce") == 0 and count(graph, "copy") == 0


def test_readers_that_want_the_same_share_one_op() -> None:
    # Three projections read one normed value: one copy, so that one gradient is summed.
    names = {
        "parameter self_attn.q_proj.weight": "S(0)",
        "parameter self_attn.k_proj.weight": "S(0)",
        "parameter self_attn.v_proj.weight": "S(0)",
        "linear": "shard n",
        "linear.1": "shard n",
        "linear.2": "shard n",
    }
    graph = inserted("llama", "model.layers.0", names)
    copies = [n for n in graph.graph.nodes if getattr(n.target, "_opname", "") == "copy"]
    assert len(copies) == 1 and len(copies[0].users) == 3


def test_operands_are_found_in_the_order_of_the_call() -> None:
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    node = graph.call_function(len, ([b, a], b), {"k": a})
    assert operands_of(node) == [b, a]


def test_an_edge_that_the_table_has_not_is_refused() -> None:
    graph, slots = toys.block("mlp", KIND)
    place(KIND, graph, slots, {}, toys.placement("R"), 2)
    value = next(n for n in graph.graph.nodes if n.name == "embedding")
    value.meta["placement"] = toys.placement("R*")
    node = next(n for n in graph.graph.nodes if n.name == "add")
    node.meta["strategy"] = type(node.meta["strategy"])(
        "x", (toys.placement("P"), toys.placement("P")), toys.placement("P")
    )
    with pytest.raises(PassError, match=r"no way from R\* to P for embedding, which add reads"):
        insert_collectives(graph, toys.placement("R"), 2)


def test_nothing_is_inserted_when_everything_is_replicated() -> None:
    before, _ = toys.block("mlp", KIND)
    assert inserted("mlp", KIND, {}).code == before.code
