"""Who shares memory, who writes into it, and who would notice."""

from __future__ import annotations

import torch
from torch import fx

from autopar.passes.analysis.aliases import memory_roots, read_later, written

aten = torch.ops.aten


def graph_of(*calls):  # type: ignore[no-untyped-def]
    """Nodes by name: `calls` are (name, target, args), where strings name nodes."""
    graph = fx.Graph()
    nodes = {"x": graph.placeholder("x")}
    for name, target, args in calls:
        nodes[name] = graph.call_function(
            target, tuple(nodes.get(a, a) if isinstance(a, str) else a for a in args)
        )
    graph.output(nodes[calls[-1][0]])
    return graph, nodes


def test_views_share_memory_and_computed_values_do_not() -> None:
    graph, n = graph_of(
        ("v", aten.view.default, ("x", [4])),
        ("t", aten.t.default, ("v",)),
        ("y", aten.neg.default, ("t",)),
        ("s", aten.split.Tensor, ("y", 2)),
        ("g", __import__("operator").getitem, ("s", 0)),
    )
    roots = memory_roots(graph)
    assert roots[n["t"]] is n["x"] and roots[n["y"]] is n["y"] and roots[n["g"]] is n["y"]


def test_ops_in_place_write_their_first_operand() -> None:
    graph, n = graph_of(("y", aten.neg.default, ("x",)), ("z", aten.add_.Tensor, ("y", 1)))
    assert written(n["z"]) == [n["y"]] and written(n["y"]) == []
    assert memory_roots(graph)[n["z"]] is n["y"]


def test_batch_norm_writes_its_statistics_only_in_training() -> None:
    for training in (True, False):
        _, n = graph_of(
            ("m", aten.zeros.default, ([4],)),
            ("v", aten.zeros.default, ([4],)),
            ("y", aten.batch_norm.default, ("x", None, None, "m", "v", training, 0.1, 1e-5, False)),
        )
        assert written(n["y"]) == ([n["m"], n["v"]] if training else [])


def test_a_write_is_noticed_by_other_names_only() -> None:
    calls = [
        ("y", aten.neg.default, ("x",)),
        ("v", aten.slice.Tensor, ("y", 0, 0, 1)),
        ("w", aten.mul_.Tensor, ("v", 2)),
    ]
    for last, noticed in (
        (("z", aten.neg.default, ("y",)), True),
        (("z", aten.neg.default, ("w",)), False),
    ):
        graph, n = graph_of(*calls, last)
        order = {node: i for i, node in enumerate(graph.nodes)}
        assert read_later(n["w"], n["v"], memory_roots(graph), order) == noticed
