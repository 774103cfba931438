"""Choices that leave a block to be counted, and become slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.experts.operands import is_expert_call
from autopar.runtime import collectives  # noqa: F401 - registers the ops
from autopar.runtime.expert_block import ExpertBlock, SlotTable
from autopar.runtime.expert_load import LayerExperts
from autopar.runtime.slot_order import EMPTY
from autopar.stage_program import BlockProgram, Rerun


def block(target: Any, *more: Any) -> BlockProgram:
    """Experts of two weights, of which the second was cast before the call."""
    graph = fx.Graph()
    up, down, hidden, index, weights = (graph.placeholder(n) for n in "uwxik")
    cast = graph.call_function(torch.ops.aten.to.dtype, (down, torch.float32))
    call = graph.call_function(
        target, (hidden, index, weights, up, cast, None, None, None, None, 3, *more)
    )
    graph.output((call,))
    module = fx.GraphModule({}, graph)
    return BlockProgram("layer", module, ("moe.up", "moe.down"), (), ("x", "i", "k"), ("y",))


TEXT = "v0 = relu.default(x); v0"


def test_an_index_is_counted_and_taken_off_the_outputs() -> None:
    counted = ExpertBlock.of(block(torch.ops.autopar.experts.default, 0, 1, False, TEXT))
    (layer,) = counted.layers
    assert (layer.layer, layer.experts, layer.ranks) == ("moe", 3, 1)
    index = torch.tensor([[0, 2], [2, 2]])
    inputs = torch.randn(3, 4, 5), torch.randn(3, 5, 4), torch.randn(2, 5), index, torch.ones(2, 2)
    outputs = counted.graph(*inputs)
    assert len(outputs) == 2
    assert len(counted.count(outputs)) == 1
    counted.count(counted.graph(*inputs))
    assert layer.counts is not None and layer.counts.tolist() == [2, 0, 6]
    assert layer.parameters == ("moe.up", "moe.down")


def test_own_experts_tell_over_how_many_ranks() -> None:
    target = torch.ops.autopar.own_experts.default
    assert ExpertBlock.of(block(target, False, TEXT, 4, "tp")).layers[0].ranks == 4


def test_a_block_without_experts_keeps_its_graph() -> None:
    graph = fx.symbolic_trace(lambda x: (x + 1,))
    made = ExpertBlock.of(BlockProgram("b", graph, (), (), ("x",), ("y",)))
    assert made.graph is graph and not made.layers
    assert made.count((torch.ones(1),)) == (torch.ones(1),)


def test_moved_experts_give_the_same() -> None:
    program = block(torch.ops.autopar.experts.default, 0, 1, False, TEXT)
    made = ExpertBlock.of(program)
    index = torch.tensor([[0, 2], [2, 1]])
    up, down = torch.randn(3, 4, 5), torch.randn(3, 5, 4)
    rest = torch.randn(2, 5), index, torch.rand(2, 2)
    expected = made.graph(up, down, *rest)
    order = (2, 0, 1)
    made.layers[0].order = order
    placed = made.placed(program, torch.device("cpu"))
    found = placed.graph(up[list(order)], down[list(order)], *rest)
    torch.testing.assert_close(found[0], expected[0])
    # Counted by expert, not by slot.
    assert torch.equal(found[1], index)


def test_copies_and_empty_slots_give_the_same() -> None:
    """Expert 2 is in slots 0 and 4, slot 3 is empty; rows of each go to both in turn."""
    program = block(torch.ops.autopar.own_experts.default, False, TEXT, 1, "tp")
    program = replace(program, spare={"moe.up": 2, "moe.down": 2})
    made = ExpertBlock.of(program)
    (layer,) = made.layers
    assert layer.spare == 2 and layer.own == 5
    index = torch.tensor([[0, 2], [2, 1], [1, 2]])
    up, down = torch.rand(3, 4, 5), torch.randn(3, 5, 4)
    rest = torch.rand(3, 5), index, torch.rand(3, 2)
    whole = ExpertBlock.of(block(torch.ops.autopar.experts.default, 0, 1, False, TEXT))
    expected = whole.graph(up, down, *rest)
    layer.order = (2, 0, 1, EMPTY, 2)
    placed = made.placed(program, torch.device("cpu"))
    (call,) = [n for n in placed.graph.graph.nodes if is_expert_call(n)]
    assert call.args[9] == 5
    # One rank has all: the form of the op for that.
    call.target = torch.ops.autopar.experts.default
    call.args = (*call.args[:10], 0, 1, *call.args[10:12])
    placed.graph.recompile()
    slots = [2, 0, 1, 0, 2]
    held = up[slots].requires_grad_(), down[slots].requires_grad_()
    found = placed.graph(*held, *rest)
    torch.testing.assert_close(found[0], expected[0])
    assert torch.equal(found[1], index)
    up_grad, _ = torch.autograd.grad(found[0].sum(), held)
    assert not up_grad[3].any() and up_grad[0].any() and up_grad[4].any()


def test_dropped_choices_are_behind_all_slots() -> None:
    layer = LayerExperts("moe", 3, False, 1, order=(0, 1, 2, EMPTY), limited=True, spare=1)
    table = SlotTable.of(layer, torch.device("cpu"))
    assert table.slots.squeeze(1).tolist() == [0, 1, 2, 4]
    assert (table.count, table.most) == (5, 1)


def test_experts_that_run_again_get_their_slots_again() -> None:
    program = block(torch.ops.autopar.experts.default, 0, 1, False, TEXT)
    ops = tuple(n.name for n in program.graph.graph.nodes if n.op == "call_function")
    rerun = Rerun(ops, (), ())
    made = ExpertBlock.of(replace(program, rerun=rerun))
    assert made.rerun == rerun
    made.layers[0].order = (2, 0, 1)
    placed = made.placed(replace(program, rerun=rerun), torch.device("cpu"))
    assert placed.rerun is not None
    before, slots, call = placed.rerun.ops
    assert (before, call) == ops
    assert slots in [node.name for node in placed.graph.graph.nodes]


def test_a_weight_that_something_else_reads_is_not_the_experts_alone() -> None:
    program = block(torch.ops.autopar.experts.default, 0, 1, False, TEXT)
    graph = program.graph.graph
    up = next(iter(graph.find_nodes(op="placeholder")))
    with graph.inserting_before(graph.output_node()):
        graph.call_function(torch.ops.aten.sum.default, (up,))
    (layer,) = ExpertBlock.of(program).layers
    assert layer.layer == "moe" and not layer.parameters
