"""One rank's part of every sequence: what is gathered, sliced and put together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.testing import FileCheck

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.parts import Parts
from autopar.passes.rewrite.cut_blocks import CutBlocks
from autopar.passes.rewrite.split_sequence import SplitSequence, split_sequence
from tests.passes import sequence_toy, toys


def test_rows_of_queries_meet_gathered_keys() -> None:
    graph, slots = sequence_toy.layer()
    split_sequence("layers.0", graph, slots, sequence_toy.ROWS, 2)
    FileCheck().check("all_gather.default(getitem, 2, 2, 'cp')").check(
        "all_gather.default(getitem_1, 2, 2, 'cp')"
    ).check("attention_rows.default(transpose, all_gather").check("None, True, 2, 'cp')").run(
        graph.code
    )
    inputs = {n.name: tuple(n.meta["val"].shape) for n in graph.graph.find_nodes(op="placeholder")}
    assert inputs["embedding"] == (1, 8, 32) and inputs["p_layers_0_q_weight"] == (32, 32)
    # The next axis starts from a graph without marks.
    marks = ("placement", "strategy", "reshard", "global_shape")
    assert not any(mark in n.meta for n in graph.graph.nodes for mark in marks)


def test_by_heads_values_travel_there_and_back() -> None:
    graph, slots = sequence_toy.layer()
    chosen = {**sequence_toy.ROWS, "scaled_dot_product_attention": "shard g"}
    split_sequence("layers.0", graph, slots, chosen, 2)
    FileCheck().check_count("all_to_all.default", 3).check(
        "scaled_dot_product_attention.default(all_to_all"
    ).check("all_to_all.default").run(graph.code)


def test_the_loss_is_a_share_of_all_targets() -> None:
    program = sequence_toy.program()
    plan = replace(
        toys.plan("mlp"),
        mesh=Mesh(cp=2),
        sizes={**program.sizes, "batch": 1},
        cp_placements={
            "head": {
                "linear": "shard b1",
                "flatten": "shard f0",
                "cross_entropy_loss": "shard t",
            }
        },
    )
    parts = CutBlocks().run(Parts(program, plan, dict(plan.sizes)))
    made = SplitSequence().run(parts).graphs["head"]
    FileCheck().check("cross_entropy_loss.default(flatten").check(
        "loss_share.default(cross_entropy_loss"
    ).check("-100, 2, 'cp')").check("all_reduce.default(loss_share").run(made.code)


def test_what_cp_does_not_divide_is_refused_by_name() -> None:
    program = sequence_toy.program()
    plan = replace(toys.plan("mlp"), mesh=Mesh(cp=3), sizes={**program.sizes, "batch": 1})
    parts = CutBlocks().run(Parts(program, plan, dict(plan.sizes)))
    with pytest.raises(PlanError, match=r"cp 3 can't split embedding of shape \[1, 16, 32\]"):
        SplitSequence().run(parts)


def test_without_cp_nothing_changes() -> None:
    program = sequence_toy.program()
    plan = replace(toys.plan("mlp"), sizes=dict(program.sizes))
    parts = CutBlocks().run(Parts(program, plan, dict(plan.sizes)))
    before = {kind: graph.code for kind, graph in parts.graphs.items()}
    after = SplitSequence().run(parts).graphs
    assert {kind: graph.code for kind, graph in after.items()} == before
