"""What runs beside an exchange of rows: found from the graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autopar.experts import BESIDE, QUEUED, WAY_BACK, WAY_THERE
from autopar.passes.analysis.beside_exchange import (
    beside,
    exchanges,
    group_of,
    hiding,
    independent,
    mark_beside,
    surely_beside,
)
from tests.passes.expert_block import mixtral_layer
from tests.passes.shared_experts import shared_experts

SHARED = ["gate", "act", "up_1", "mul", "down_1"]


def marked(graph: fx.GraphModule) -> dict[str, str]:
    (call,) = exchanges(graph.graph)
    mark_beside(graph.graph, call)
    assert all(n.meta[BESIDE][0] == call.name for n in graph.graph.nodes if BESIDE in n.meta)
    return {n.name: n.meta[BESIDE][1] for n in graph.graph.nodes if BESIDE in n.meta}


@pytest.mark.parametrize("between", [True, False])
def test_the_shared_expert_is_divided_between_both_ways(between: bool) -> None:
    graph = shared_experts(2, between=between)
    (call,) = exchanges(graph.graph)
    assert [n.name for n in independent(graph.graph, call)] == SHARED
    there = dict.fromkeys(("act", "up_1", "mul"), WAY_THERE)
    # Three equal products: two on the way there, the first of them before the host has to wait.
    assert marked(graph) == {"gate": QUEUED, **there, "down_1": WAY_BACK}
    assert [n.name for n in beside(graph.graph, call, WAY_BACK, QUEUED)] == ["gate", "down_1"]


def test_what_it_hides_behind_is_summed_by_way() -> None:
    graph = shared_experts(2)
    marked(graph)
    (call,) = exchanges(graph.graph)
    found = hiding(call, lambda node: (1.0, 10.0) if node.name != "act" else (0.5, 0.5))
    assert found == (3.5, 1.0, 30.5, 10.0)


def unsplit(**how: bool) -> fx.GraphModule:
    """Before anything is placed: the experts are whole."""
    graph = shared_experts(1, **how)
    for node in exchanges(graph.graph):
        node.target = torch.ops.autopar.experts.default
    return graph


def test_first_products_are_surely_beside_wherever_collectives_come() -> None:
    found = surely_beside(unsplit(between=True).graph)
    assert {n.name: call for n, call in found.items()} == {"gate": "experts", "up_1": "experts"}
    # As one rank has it, with a collective before the second half: they are marked all the same.
    graph = shared_experts(2, "tp", between=True)
    mul = next(n for n in graph.graph.nodes if n.name == "mul")
    with graph.graph.inserting_after(mul):
        moved = graph.graph.call_function(torch.ops.autopar.all_gather.default, (mul, 0, 2, "tp"))
    moved.meta = {**mul.meta, "val": mul.meta["val"]}
    mul.replace_all_uses_with(moved, delete_user_cb=lambda user: user is not moved)
    here = marked(graph)
    assert {"gate", "up_1"} <= set(here) and "down_1" not in here


def test_nothing_is_sure_where_numbers_are_drawn_or_rows_travel_between_replicas() -> None:
    assert surely_beside(unsplit(draws=True).graph) == {}
    assert surely_beside(shared_experts(2).graph) == {}


def test_random_numbers_stay_in_their_order() -> None:
    assert marked(shared_experts(2, draws=True)) == {}


def test_memory_that_changes_is_not_read_at_another_time() -> None:
    graph = shared_experts(2, between=True)
    hidden = next(n for n in graph.graph.nodes if n.name == "hidden")
    with graph.graph.inserting_before(exchanges(graph.graph)[0]):
        graph.graph.call_function(torch.ops.aten.mul_.Tensor, (hidden, 2))
    assert marked(graph) == {}


def test_without_a_product_nothing_is_gained() -> None:
    graph = shared_experts(2)
    for node in reversed(list(graph.graph.nodes)):
        if node.name == "add":
            node.replace_all_uses_with(exchanges(graph.graph)[0])
        if node.name in (*SHARED, "add"):
            graph.graph.erase_node(node)
    hidden = next(n for n in graph.graph.nodes if n.name == "hidden")
    with graph.graph.inserting_before(exchanges(graph.graph)[0]):
        node = graph.graph.call_function(torch.ops.aten.silu.default, (hidden,))
    node.meta = dict(hidden.meta)
    assert marked(graph) == {}


def test_experts_that_are_whole_exchange_nothing() -> None:
    assert exchanges(mixtral_layer().graph.graph) == []


def collective(graph: fx.GraphModule, source: str, reader: str, group: str) -> fx.Node:
    """The value of a node, summed over a group before it is read."""
    by_name = {n.name: n for n in graph.graph.nodes}
    target: Any = torch.ops.autopar.all_reduce.default
    with graph.graph.inserting_before(by_name[reader]):
        node = graph.graph.call_function(target, (by_name[source], group))
    node.meta = {**by_name[source].meta, "reshard": None}
    by_name[reader].replace_input_with(by_name[source], node)
    assert group_of(node) == group
    return node


def test_a_collective_of_the_same_ranks_is_not_beside() -> None:
    """Before, where it needs no product; else what it leads to comes after."""
    graph = shared_experts(2, "tp")
    collective(graph, "hidden", "gate", "tp")
    late = collective(graph, "mul", "down_1", "tp")
    assert marked(graph) == {
        **{"gate": QUEUED, "act": WAY_THERE, "up_1": WAY_BACK, "mul": WAY_BACK}
    }
    assert BESIDE not in late.meta


def test_a_collective_of_other_ranks_is() -> None:
    graph = shared_experts(2)
    inside = collective(graph, "mul", "down_1", "tp")
    assert inside.name in marked(graph)
