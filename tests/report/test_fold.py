from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.report.block_picture import BlockPicture, EdgePicture, OpPicture
from autopar.report.fold import counted, fold
from tests.report import sample


def block(ops: list[OpPicture], *edges: tuple[str, str] | EdgePicture) -> BlockPicture:
    drawn = (e if isinstance(e, EdgePicture) else EdgePicture(*e) for e in edges)
    return BlockPicture("b", 1, tuple(ops), tuple(drawn))


def test_a_layer_becomes_readable_and_loses_nothing() -> None:
    whole, folded = sample.layer(), fold(sample.layer())
    assert len(whole.ops) > 50 and len(folded.ops) == 16
    for total in ("flops", "seconds", "saved_bytes"):
        assert sum(getattr(o, total) for o in folded.ops) == pytest.approx(
            sum(getattr(o, total) for o in whole.ops)
        )
    assert sum(not e.is_local for e in folded.edges) == sum(not e.is_local for e in whole.edges)


def test_a_norm_is_named_after_its_module() -> None:
    names = [op.op for op in fold(sample.layer()).ops]
    assert "input_layernorm" in names and "post_attention_layernorm" in names
    assert names.count("mul ×2, neg, cat, add") == 2


def test_views_go_into_their_producer_but_not_across_a_change_of_placement() -> None:
    linear = OpPicture("linear", "linear", placement="S(2)")
    view = OpPicture("view", "view", placement="S(1)", trivial=True)
    cut = OpPicture("slice", "slice", placement="R", trivial=True)
    folded = fold(block([linear, view, cut], ("linear", "view"), ("view", "slice")))
    assert [op.name for op in folded.ops] == ["linear", "slice"]
    assert folded.ops[0].members == ("linear", "view")
    assert folded.edges == (EdgePicture("linear", "slice"),)


def test_a_collective_is_never_folded_away() -> None:
    a, b = OpPicture("a", "mul", placement="R"), OpPicture("b", "mul", placement="R")
    assert len(fold(block([a, b], EdgePicture("a", "b", "", "all_reduce"))).ops) == 2
    assert len(fold(block([a, b], ("a", "b"))).ops) == 1


def test_a_renamed_input_is_the_input() -> None:
    view = OpPicture("unsqueeze", "unsqueeze", trivial=True)
    folded = fold(
        block([view, OpPicture("mul", "mul")], ("cos", "unsqueeze"), ("unsqueeze", "mul"))
    )
    assert [op.name for op in folded.ops] == ["mul"]
    assert folded.edges == (EdgePicture("cos", "mul"),)


def test_no_cycle_where_a_branch_rejoins() -> None:
    # add -> linear -> mul and add -> mul: add and mul in one would be a cycle.
    ops = [OpPicture("add", "add"), OpPicture("linear", "linear"), OpPicture("mul", "mul")]
    folded = fold(block(ops, ("add", "linear"), ("linear", "mul"), ("add", "mul")))
    assert [op.name for op in folded.ops] == ["add", "linear", "mul"]


def test_counted() -> None:
    assert counted(["mul", "neg", "mul"]) == "mul ×2, neg"


@st.composite
def pictures(draw: st.DrawFn) -> BlockPicture:
    count = draw(st.integers(1, 12))
    ops = [
        OpPicture(
            f"op{i}", draw(st.sampled_from(["mul", "linear", "view"])),
            module=draw(st.sampled_from(["", "m", "n"])),
            placement=draw(st.sampled_from(["R", "S(0)", "S(1)"])),
            flops=float(i), trivial=draw(st.booleans()),
        )
        for i in range(count)
    ]  # fmt: skip
    edges = [
        EdgePicture(f"op{a}", f"op{b}", draw(st.sampled_from(["", "", "all_gather"])))
        for b in range(count)
        for a in range(b)
        if draw(st.booleans())
    ]
    return BlockPicture("b", 1, tuple(ops), tuple(edges))


@settings(max_examples=60, deadline=None)
@given(pictures())
def test_folding_keeps_the_graph_acyclic_and_complete(picture: BlockPicture) -> None:
    folded = fold(picture)
    graph = nx.DiGraph([(e.source, e.target) for e in folded.edges])
    graph.add_nodes_from(op.name for op in folded.ops)
    assert nx.is_directed_acyclic_graph(graph)
    assert set(graph) == {op.name for op in folded.ops}
    told = [name for op in folded.ops for name in op.members or (op.name,)]
    assert sorted(told) == sorted(op.name for op in picture.ops)
    # Edges with collectives stay, seen between the groups; only equal ones become one.
    home = {name: op.name for op in folded.ops for name in op.members or (op.name,)}
    sent = {(home[e.source], home[e.target]) for e in picture.edges if not e.is_local}
    assert sent == {(e.source, e.target) for e in folded.edges if not e.is_local}
