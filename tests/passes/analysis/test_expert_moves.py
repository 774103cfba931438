"""Exchanges of rows between ranks that split experts: over which ranks, how far apart."""

from __future__ import annotations

import pytest

from autopar.axis import Axis
from autopar.cost.experts import exchange_seconds
from autopar.op_call import STATIC, op_call
from autopar.passes.analysis.expert_moves import expert_moves, over_replicas
from autopar.passes.analysis.roofline import roofline
from autopar.passes.rewrite.split_experts import expert_calls, split_experts
from autopar.program import copy_graph
from tests.passes.expert_block import CLUSTER, mixtral_layer


@pytest.mark.parametrize("tp", [1, 8])
def test_replicas_are_tp_ranks_apart(tp: int) -> None:
    graph = copy_graph(mixtral_layer().graph)
    split_experts(graph, 4)
    call = op_call(expert_calls(graph)[0], STATIC)
    axis = Axis(tp, 1, CLUSTER)
    assert over_replicas(call)
    forward, backward = expert_moves(call, axis)
    assert (forward, backward) == exchange_seconds(call, tp, CLUSTER)
    assert forward > 0 and backward > 0
    moved = [p.cost for p in roofline(graph, axis) if p.axis == "ep"]
    assert [(c.forward_seconds, c.backward_seconds) for c in moved] == [(forward, backward)]


def test_across_nodes_takes_longer() -> None:
    graph = copy_graph(mixtral_layer().graph)
    split_experts(graph, 2)
    call = op_call(expert_calls(graph)[0], STATIC)
    inside, across = (sum(expert_moves(call, Axis(tp, 1, CLUSTER))) for tp in (1, 8))
    assert across > inside


def test_experts_that_are_whole_move_nothing() -> None:
    kind = mixtral_layer()
    call = op_call(expert_calls(kind.graph)[0], STATIC)
    assert not over_replicas(call) and expert_moves(call, Axis(1, 1, CLUSTER)) == (0.0, 0.0)
