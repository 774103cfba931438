"""Messages of splitting the sequence: whose bytes, over which ranks."""

from __future__ import annotations

import pytest

from autopar.axis import Axis
from autopar.cluster import Cluster
from autopar.cost.collective import collective_time
from autopar.op_call import STATIC, op_call
from autopar.passes.analysis.roofline import roofline
from autopar.passes.analysis.sequence_moves import sequence_moves
from autopar.passes.rewrite.split_sequence import split_sequence
from tests.passes import sequence_toy

CLUSTER = Cluster.parse("h100:2x8")
KEYS = 1 * 2 * 16 * 8 * 4  # batch, key heads, positions, head dim, float32


@pytest.mark.parametrize("tp", [1, 4])
def test_keys_and_values_are_gathered_over_ranks_tp_apart(tp: int) -> None:
    graph, slots = sequence_toy.layer()
    split_sequence("layers.0", graph, slots, sequence_toy.ROWS, 2)
    axis = Axis(tp, 1, CLUSTER, 2)
    calls = [op_call(n, STATIC) for n in graph.graph.nodes if n.op == "call_function"]
    moves = {c.name: m for c in calls if (m := sequence_moves(c, axis)) is not None}
    gather = collective_time("all_gather", KEYS, 2, tp, CLUSTER)
    scatter = collective_time("reduce_scatter", KEYS, 2, tp, CLUSTER)
    assert list(moves.values()) == [("all_gather", gather, scatter)] * 2
    prices = [p for p in roofline(graph, axis) if p.axis == "cp"]
    assert [(p.cost.forward_seconds, p.cost.backward_seconds) for p in prices] == [
        (gather, scatter)
    ] * 2


def test_by_heads_every_value_travels_there_and_back() -> None:
    graph, slots = sequence_toy.layer()
    chosen = {**sequence_toy.ROWS, "scaled_dot_product_attention": "shard g"}
    split_sequence("layers.0", graph, slots, chosen, 2)
    axis = Axis(1, 1, CLUSTER, 2)
    calls = [op_call(n, STATIC) for n in graph.graph.nodes if n.op == "call_function"]
    moves = [m for c in calls if (m := sequence_moves(c, axis)) is not None]
    assert [m[0] for m in moves] == ["all_to_all"] * 4  # q, k, v and the result
    whole = [2 * KEYS, KEYS, KEYS, 2 * KEYS]
    assert [m[1] for m in moves] == [collective_time("all_to_all", n, 2, 1, CLUSTER) for n in whole]


def test_ops_that_move_nothing_have_no_message() -> None:
    graph, _ = sequence_toy.layer()
    axis = Axis(1, 1, CLUSTER, 2)
    calls = [op_call(n, STATIC) for n in graph.graph.nodes if n.op == "call_function"]
    assert not any(sequence_moves(c, axis) for c in calls)
