"""Shared experts beside the exchange of the others: the order of a block's ops."""

from __future__ import annotations

import pytest
from torch.testing import FileCheck

from autopar.experts import BESIDE, WAY_BACK
from autopar.passes.analysis.beside_exchange import exchanges, mark_beside
from autopar.passes.rewrite.order_exchanges import order_exchanges
from autopar.passes.rewrite.split_experts import split_experts
from autopar.program import copy_graph
from tests.passes.analysis.test_beside_exchange import collective
from tests.passes.expert_block import mixtral_layer
from tests.passes.shared_experts import names, shared_experts

ORDERED = ["doubled", "gate", "act", "up_1", "mul", "experts", "down_1", "add"]


@pytest.mark.parametrize("between", [True, False])
@pytest.mark.parametrize("group", ["ep", "tp"])
def test_around_the_exchange(group: str, between: bool) -> None:
    graph = shared_experts(2, group, between=between)
    if group == "ep":
        mark_beside(graph.graph, exchanges(graph.graph)[0])
    order_exchanges(graph)
    assert names(graph) == ORDERED
    FileCheck().check("gate =").check("exchanged_experts.default(").check("down_1 =").run(
        graph.code
    )


def test_between_replicas_what_was_not_marked_stays() -> None:
    graph = shared_experts(2)
    before = names(graph)
    order_exchanges(graph)
    assert names(graph) == before


@pytest.mark.parametrize("group", ["ep", "tp"])
def test_exchanges_beside_each_other_do_not_wait_for_each_other(group: str) -> None:
    graph = shared_experts(2, group, twice=True)
    if group == "ep":
        for call in exchanges(graph.graph):
            mark_beside(graph.graph, call)
    order_exchanges(graph)  # checks the order
    marks = {n.name: n.meta[BESIDE][0] for n in graph.graph.nodes if BESIDE in n.meta}
    assert set(marks) == {"gate", "act", "up_1", "mul", "down_1"}
    assert set(marks.values()) == {"experts"}


def test_collectives_of_tp_go_with_what_they_need() -> None:
    """They were inserted after ops were marked."""
    graph = shared_experts(2)
    mark_beside(graph.graph, exchanges(graph.graph)[0])
    gathered = collective(graph, "hidden", "gate", "tp")
    late = collective(graph, "down_1", "add", "tp")
    order_exchanges(graph)
    wanted = [ORDERED[0], gathered.name, *ORDERED[1:-1], late.name, ORDERED[-1]]
    assert names(graph) == wanted
    assert late.meta[BESIDE] == ("experts", WAY_BACK) and BESIDE not in gathered.meta


def test_collectives_of_the_same_ranks_do_not_wait_for_it() -> None:
    graph = shared_experts(2, "tp", between=True)
    gathered = collective(graph, "hidden", "gate", "tp")
    late = collective(graph, "mul", "down_1", "tp")
    order_exchanges(graph)
    found = names(graph)
    assert found.index(gathered.name) < found.index("gate") < found.index("experts")
    assert found.index("mul") < found.index(late.name) < found.index("down_1")
    assert found.index(late.name) > found.index("experts")


def test_without_shared_experts_nothing_moves() -> None:
    graph = copy_graph(mixtral_layer().graph)
    split_experts(graph, 2)
    before = names(graph)
    order_exchanges(graph)
    assert names(graph) == before
    assert not any(BESIDE in n.meta for n in graph.graph.nodes)
