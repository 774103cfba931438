"""Exchanges of rows between ranks that split experts: over which ranks, how far apart."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.axis import Axis
from autopar.cost.experts import ExchangeTime, exchange_seconds
from autopar.cost.step import usual_slowdown
from autopar.op_call import STATIC, op_call
from autopar.passes.analysis.expert_moves import Hiding, expert_moves, exposed_moves, over_replicas
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
    moves = expert_moves(call, axis)
    assert moves == exchange_seconds(call, tp, CLUSTER)
    assert min(moves) > 0 and exposed_moves(call, axis) == (moves.forward, moves.backward)
    moved = [p.cost for p in roofline(graph, axis) if p.axis == "ep"]
    wanted = [(moves.forward, moves.backward)]
    assert [(c.forward_seconds, c.backward_seconds) for c in moved] == wanted


def test_across_nodes_takes_longer() -> None:
    graph = copy_graph(mixtral_layer().graph)
    split_experts(graph, 2)
    call = op_call(expert_calls(graph)[0], STATIC)
    inside, across = (sum(expert_moves(call, Axis(tp, 1, CLUSTER))) for tp in (1, 8))
    assert across > inside


def test_experts_that_are_whole_move_nothing() -> None:
    kind = mixtral_layer()
    call = op_call(expert_calls(kind.graph)[0], STATIC)
    assert not over_replicas(call) and expert_moves(call, Axis(1, 1, CLUSTER)) == ExchangeTime()


def test_what_compute_beside_it_leaves() -> None:
    """Each way behind what runs beside it, which takes longer for that; nothing where a framework
    does not overlap."""
    graph = copy_graph(mixtral_layer().graph)
    split_experts(graph, 4)
    (node,) = expert_calls(graph)
    call, axis = op_call(node, STATIC), Axis(1, 1, CLUSTER)
    moves = expert_moves(call, axis)
    behind = Hiding(moves.there / 2, 2 * moves.back, 0.0, 2 * moves.gradient_back)
    forward, backward = exposed_moves(call, axis, behind)
    slowdown = CLUSTER.device.overlap_slowdown or usual_slowdown()
    assert forward == pytest.approx(moves.there / 2 * (1 + slowdown) + slowdown * moves.back)
    assert backward == pytest.approx(moves.gradient_there + slowdown * moves.gradient_back)
    device = replace(CLUSTER.device, overlap_experts=False)
    apart = Axis(1, 1, replace(CLUSTER, device=device))
    assert exposed_moves(call, apart, behind) == (moves.forward, moves.backward)
    node.args = (*node.args[:-1], "tp")
    placed = op_call(node, STATIC)
    assert exposed_moves(placed, apart, behind) == (moves.forward, moves.backward)


@pytest.mark.parametrize("part", [0.25, 1.0, 4.0])
def test_over_the_placed_axis_the_shorter_way_hides(part: float) -> None:
    """Nobody knows beside which way work runs: as if all of it ran beside the shorter one."""
    graph = copy_graph(mixtral_layer().graph)
    split_experts(graph, 4)
    (node,) = expert_calls(graph)
    node.args = (*node.args[:-1], "tp")
    call, axis = op_call(node, STATIC), Axis(1, 1, CLUSTER)
    moves = expert_moves(call, axis)
    slowdown = CLUSTER.device.overlap_slowdown or usual_slowdown()
    forward, backward = exposed_moves(call, axis, Hiding(part * moves.back, 0.0, 0.0, 0.0))
    hidden = min(part, 1.0) * moves.back
    assert moves.back < moves.there
    assert forward == pytest.approx(moves.forward - (1 - slowdown) * hidden)
    assert backward == moves.backward
