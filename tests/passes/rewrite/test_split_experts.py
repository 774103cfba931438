"""The experts of a block over the ranks of ep: smaller parameters, rows that travel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.testing import FileCheck

from autopar.errors import PlanError
from autopar.marks import REPLICATE
from autopar.mesh import EP, Mesh
from autopar.parts import Parts
from autopar.passes.rewrite.split_experts import (
    SplitExperts,
    expert_calls,
    held_slots,
    not_split,
    split_experts,
)
from autopar.program import copy_graph
from tests.passes import toys
from tests.passes.expert_block import held, mixtral_layer


def test_each_rank_has_a_part_of_the_experts_and_its_own_tokens() -> None:
    kind = mixtral_layer()
    graph = copy_graph(kind.graph)
    (before,) = expert_calls(graph)
    tokens = before.meta["val"].shape
    whole = held(kind.graph, kind.slots)
    assert split_experts(graph, 2)
    FileCheck().check("exchanged_experts.default(").check(", 4, False,").check("2, 'ep')").run(
        graph.code
    )
    (call,) = expert_calls(graph)
    assert call.meta["val"].shape == tokens
    split = held(graph, kind.slots)
    assert {n: (2, *s[1:]) for n, s in whole.items()} == split
    assert {s.name for s in held_slots(graph, kind.slots)} == set(whole)
    marked = [n for n in graph.graph.find_nodes(op="placeholder") if n.meta.get(EP)]
    assert len(marked) == len(whole)
    # The graph that it was made from is as it was.
    assert held(kind.graph, kind.slots) == whole


def test_a_block_without_experts_stays() -> None:
    graph, _ = toys.block("mlp", "layers.0")
    assert not split_experts(graph, 2)


@pytest.mark.parametrize(
    ("ranks", "message"), [(3, "4 experts do not divide by 3"), (8, "4 experts do not divide by 8")]
)
def test_what_does_not_divide_is_told(ranks: int, message: str) -> None:
    kind = mixtral_layer()
    assert message in not_split(kind.graph, kind.slots, ranks)
    assert not not_split(kind.graph, kind.slots, 4)


def test_experts_that_other_ops_read_are_not_split() -> None:
    kind = mixtral_layer()
    graph = copy_graph(kind.graph)
    (call,) = expert_calls(graph)
    up: Any = call.args[3]
    with graph.graph.inserting_after(call):
        graph.graph.call_function(call.target, tuple(call.args))
    assert f"other ops read the parameter {_name(kind, up.name)!r} too" in not_split(
        graph, kind.slots, 2
    )


def _name(kind: Any, node: str) -> str:
    nodes = [n.name for n in kind.graph.graph.find_nodes(op="placeholder")]
    return str(kind.slots[nodes.index(node)].name)


def test_replicated_by_the_user() -> None:
    kind = mixtral_layer()
    graph = copy_graph(kind.graph)
    expert_calls(graph)[0].meta[REPLICATE] = True
    assert "marked to be replicated" in not_split(graph, kind.slots, 2)


def test_a_plan_with_ep_needs_experts_that_divide() -> None:
    kind = mixtral_layer()
    plan = replace(toys.plan("mlp"), mesh=Mesh(dp=3, ep=3))
    parts = Parts(toys.captured("mlp"), plan, graphs={"a": kind.graph}, slots={"a": kind.slots})
    with pytest.raises(PlanError, match="ep 3 can't split the experts of a: its 4 experts"):
        SplitExperts().run(parts)
    none = parts.evolve(graphs={}, slots={})
    with pytest.raises(PlanError, match="the model has no experts"):
        SplitExperts().run(none)
    one = parts.evolve(plan=toys.plan("mlp"))
    assert SplitExperts().run(one) is one
