"""Values and units of a block: what autograd keeps in all, what belongs together, what can't run
twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from autopar.parts import Slot
from autopar.passes.analysis.block_memory import block_memory
from autopar.passes.analysis.kept_values import KeptValues, kept_values
from autopar.passes.rewrite.localize_shapes import localize_shapes
from autopar.passes.rewrite.place import place
from tests.passes import toys
from tests.passes.analysis.test_block_memory import CASES

aten = torch.ops.aten
ROWS, WIDTH = 4, 8
SIZE = 4 * ROWS * WIDTH


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_with_no_op_twice_it_is_what_the_block_saves(name: str, kind: str) -> None:
    graph, slots = toys.block(name, kind)
    place(kind, graph, slots, {}, toys.placement("R"), 1)
    localize_shapes(graph, 1)
    found = kept_values(graph, slots)
    assert found.kept(()) == block_memory(graph, slots).saved
    everything = range(len(found.units))
    assert found.rebuilt(everything) + found.kept(everything) >= found.kept(())


def graph_of(build: Callable[[fx.Graph, fx.Node], fx.Node]) -> fx.GraphModule:
    """A block of one input `x` [ROWS, WIDTH] with gradient."""
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta = {"val": torch.empty(ROWS, WIDTH, device="meta"), "requires_grad": True}
    made.output((build(made, x),))
    values: dict[fx.Node, Any] = {x: x.meta["val"]}
    for node in made.nodes:
        if node.op == "call_function":
            args = fx.map_arg(node.args, values.__getitem__)
            values[node] = node.target(*args, **node.kwargs)  # type: ignore[operator]
            node.meta = {"val": values[node], "requires_grad": True}
    return fx.GraphModule(torch.nn.Module(), made)


SLOTS = (Slot("value", "x"),)


def unit(found: KeptValues, name: str) -> int:
    return next(i for i, ops in enumerate(members(found)) if name in ops)


def members(found: KeptValues) -> list[set[str]]:
    return [{n.target._opname for n in u.nodes} for u in found.units]  # type: ignore[union-attr]


def test_a_value_is_kept_for_a_reader_that_runs_again() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        y = graph.call_function(aten.neg.default, (x,))  # saves nothing
        v = graph.call_function(aten.view.default, (y, [WIDTH, ROWS]))
        z = graph.call_function(aten.exp.default, (v,))  # saves its result
        return graph.call_function(aten.mul.Tensor, (z, z))

    found = kept_values(graph_of(build), SLOTS)
    assert members(found) == [{"neg"}, {"exp"}, {"mul"}]
    assert found.kept(()) == SIZE
    assert found.kept([unit(found, "exp")]) == SIZE  # neg's, through the view
    assert found.kept([unit(found, "exp"), unit(found, "neg")]) == SIZE  # x
    assert found.rebuilt([unit(found, "exp")]) == SIZE
    assert found.rebuilt([unit(found, "neg")]) == 0


def test_what_only_a_rerun_reads_is_there_while_it_runs() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        y = graph.call_function(aten.neg.default, (x,))
        z = graph.call_function(aten.exp.default, (y,))
        return graph.call_function(aten.tanh.default, (z,))

    found = kept_values(graph_of(build), SLOTS)
    neg, exp, tanh = (unit(found, name) for name in ("neg", "exp", "tanh"))
    assert found.passing([exp]) == 0  # its result is what is rebuilt
    assert found.passing([neg]) == SIZE  # nothing keeps it
    assert found.passing([neg, exp]) == SIZE
    assert found.passing([neg, exp, tanh]) == 0  # neg's is gone when tanh's is made


def test_what_an_op_keeps_inside_goes_with_it() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        y = graph.call_function(aten.layer_norm.default, (x, [WIDTH]))
        return graph.call_function(aten.tanh.default, (y,))

    found = kept_values(graph_of(build), SLOTS)
    statistics = 2 * 4 * ROWS
    norm, tanh = unit(found, "layer_norm"), unit(found, "tanh")
    assert found.units[norm].internal == statistics
    assert found.kept(()) == 2 * SIZE + statistics  # x, tanh's
    assert found.kept([tanh, norm]) == SIZE
    assert found.rebuilt([tanh, norm]) == SIZE + statistics


def test_ops_that_share_a_value_changed_in_place_are_one_unit() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        y = graph.call_function(aten.neg.default, (x,))
        z = graph.call_function(aten.exp.default, (y,))
        w = graph.call_function(aten.mul_.Tensor, (y, 2.0))
        s = graph.call_function(aten.sin.default, (w,))
        return graph.call_function(aten.add.Tensor, (z, s))

    found = kept_values(graph_of(build), SLOTS)
    assert members(found) == [{"neg", "exp", "mul_", "sin"}, {"add"}]


def test_random_ops_and_statistics_can_not_run_twice() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        y = graph.call_function(aten.dropout.default, (x, 0.5, True))
        d = graph.call_function(aten.detach.default, (x,))
        m = graph.call_function(aten.mean.dim, (d, [0]))
        return graph.call_function(aten.mul.Tensor, (y, m))

    graph = graph_of(build)
    for node in graph.graph.nodes:
        node.meta["requires_grad"] = node.name in ("x", "dropout", "mul")
    found = kept_values(graph, SLOTS)
    assert "random" in found.units[unit(found, "dropout")].why_not
    assert "statistics" in found.units[unit(found, "mean")].why_not
    assert not found.units[unit(found, "mul")].why_not


def test_readers_of_an_input_that_changes_can_not_run_twice() -> None:
    made = fx.Graph()
    x = made.placeholder("x")
    x.meta = {"val": torch.empty(ROWS, WIDTH, device="meta"), "requires_grad": True}
    buffer = made.placeholder("b")
    buffer.meta = {"val": torch.empty(WIDTH, device="meta")}
    y = made.call_function(aten.mul.Tensor, (x, buffer))
    made.call_function(aten.add_.Tensor, (buffer, 1.0))
    made.output((y,))
    graph = fx.GraphModule(torch.nn.Module(), made)
    found = kept_values(graph, (*SLOTS, Slot("buffer", "b")))
    assert all("changes in place" in u.why_not for u in found.units)
