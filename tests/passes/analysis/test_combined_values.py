"""Which values of a batch are means or sums of those of its parts, and where they end."""

from __future__ import annotations

import torch
from torch import fx

from autopar.op_call import Bindings
from autopar.passes.analysis.combined_values import combining, descendants, until_combined

aten = torch.ops.aten


def test_what_the_parts_of_a_batch_add_up_to() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8, 5)
    mean = graph.call_function(aten.mean.dim, (x, [0]))
    total = graph.call_function(aten.sum.dim_IntList, (x, [0]))
    squares = graph.call_function(aten.mul.Tensor, (mean, mean))
    scaled = graph.call_function(aten.mul.Tensor, (total, 3.0))
    counts = graph.call_function(aten.count_nonzero.default, (x,))
    highest = graph.call_function(aten.amax.default, (x, [0]))
    nothing = graph.call_function(aten.zeros.default, ([5],))
    nodes = [mean, total, squares, scaled, counts, highest, nothing]
    sizes = (Bindings({}, {"batch": n}) for n in (8, 4))
    found = combining(nodes, {x: 0}, *sizes)
    assert found == {
        mean: "mean",
        total: "sum",
        scaled: "sum",
        counts: "sum",
        nothing: "mean",
    }


def test_what_cannot_be_run_combines_in_no_way() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(8, 5)
    wrong = graph.call_function(aten.view.default, (x, [40]))
    sizes = (Bindings({}, {"batch": n}) for n in (8, 4))
    assert combining([wrong], {x: 0}, *sizes) == {}


def test_it_ends_where_nothing_combines_any_more() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    rows = graph.call_function(aten.cat.default, ([x, x],))
    mean = graph.call_function(aten.mean.dim, (rows, [0]))
    scaled = graph.call_function(aten.mul.Tensor, (mean, 3.0))
    square = graph.call_function(aten.mul.Tensor, (scaled, scaled))
    reached = {rows, mean, scaled, square}
    for node in (x, *reached):
        node.meta["val"] = torch.empty(3)
    kinds = {mean: "mean", scaled: "mean"}
    assert until_combined(reached, kinds, never) == ({rows, mean, scaled}, {scaled})
    assert descendants([mean]) == {scaled, square}
    # Another op reads the rows themselves.
    other = graph.call_function(aten.amax.default, (rows, [0]))
    graph.output((other,))
    assert until_combined({*reached, other}, kinds, never) == (set(), set())
    assert until_combined({rows, mean}, {}, never) == (set(), set())


def never(node: fx.Node) -> bool:
    return False


def test_what_is_linear_for_the_probe_alone_comes_after() -> None:
    """A clamp that no value of the probe reaches combines there, and nowhere else."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(aten.sum.dim_IntList, (x, [0]))
    clamped = graph.call_function(aten.clamp.default, (total, None, 60.0))
    scaled = graph.call_function(aten.div.Tensor, (clamped, 4.0))
    graph.output((scaled,))
    kinds = dict.fromkeys([total, clamped, scaled], "sum")
    assert until_combined({total, clamped, scaled}, kinds, never) == ({total}, {total})


def test_a_sum_of_a_sum_is_put_together_once() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    load = graph.call_function(aten.sum.dim_IntList, (x, [0]))
    whole = graph.call_function(aten.sum.default, (load,))
    share = graph.call_function(aten.div.Tensor, (load, whole))
    graph.output((share,))
    kinds = dict.fromkeys([load, whole], "sum")
    assert until_combined({load, whole, share}, kinds, never) == ({load}, {load})


def test_a_number_of_samples_is_read_before() -> None:
    """It is that of a part; where that can't be, nothing is put together."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    total = graph.call_function(aten.sum.dim_IntList, (x, [0]))
    mean = graph.call_function(aten.div.Tensor, (total, 8.0))
    square = graph.call_function(aten.mul.Tensor, (mean, mean))
    graph.output((square,))
    kinds = {total: "sum", mean: "mean"}
    for node in (x, total, mean, square):
        node.meta["val"] = torch.empty(3)
    reached = {total, mean, square}
    assert until_combined(reached, kinds, lambda n: n is mean) == ({total, mean}, {mean})
    assert until_combined(reached, kinds, lambda n: n is square) == (set(), set())
