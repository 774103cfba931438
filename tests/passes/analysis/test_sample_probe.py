"""The probe finds the batch in results by running ops, and sees samples that mix."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from autopar.op_call import STATIC
from autopar.passes.analysis import sample_probe
from autopar.passes.analysis.sample_probe import follow

aten = torch.ops.aten
SAMPLES = 3


def probe(build: Callable[[fx.Graph, fx.Node], fx.Node], *shape: int, dim: int = 0) -> int | None:
    """The batch's dim in the result of a graph on one batched value; -1: not there; None: mixed."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(shape, device="meta")
    result = build(graph, x)
    graph.output((result,))
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    values = fx.Interpreter(fx.GraphModule(torch.nn.Module(), graph))
    values.run(x.meta["val"])  # shapes: the graph must be one that can run
    for node in nodes:
        node.meta["val"] = torch.empty(0)
    found = follow(nodes, {x: dim}, [result], STATIC, SAMPLES)
    return None if found is None else found.get(result, -1)


def test_where_the_batch_is() -> None:
    assert probe(lambda g, x: g.call_function(aten.sin.default, (x,)), 3, 4) == 0
    assert probe(lambda g, x: g.call_function(aten.numpy_T.default, (x,)), 3, 4) == 1
    assert probe(lambda g, x: g.call_function(aten.roll.default, (x, [1], [0])), 4, 3, dim=1) == 1
    assert probe(lambda g, x: g.call_function(aten.flatten.using_ints, (x, 0, 1)), 3, 4, 2) == 0
    # Two rows for each sample.
    assert probe(lambda g, x: g.call_function(aten.sin.default, (x,)), 6, 4) == 0
    assert probe(lambda g, x: g.call_function(aten.ones_like.default, (x,)), 3, 4) == -1


@pytest.mark.parametrize(
    "op",
    [
        lambda g, x: g.call_function(aten.roll.default, (x, [1], [0])),
        lambda g, x: g.call_function(aten.flip.default, (x, [0])),
        lambda g, x: g.call_function(aten.max.default, (x,)),
        lambda g, x: g.call_function(aten.cumsum.default, (x, 0)),
        lambda g, x: (
            g.call_function(aten.numpy_T.default, (x,), {})
            and x.graph.call_function(aten.mm.default, (x, list(x.users)[0]))
        ),
    ],
)
def test_mixing(op: Callable[[fx.Graph, fx.Node], fx.Node]) -> None:
    assert probe(op, 3, 4) is None


def test_a_place_in_the_batch_counts() -> None:
    def by_place(g: fx.Graph, x: fx.Node) -> fx.Node:
        place = g.call_function(aten.arange.default, (SAMPLES,))
        column = g.call_function(aten.unsqueeze.default, (place, 1))
        return g.call_function(aten.mul.Tensor, (x, column))

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3, 4)
    result = by_place(graph, x)
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    for node in nodes:
        node.meta["val"] = torch.empty(0)
    assert follow(nodes, {x: 0}, [result], STATIC, SAMPLES) is None


def test_what_is_too_large_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_probe, "LIMIT", 11)
    assert probe(lambda g, x: g.call_function(aten.sin.default, (x,)), 3, 4) is None


def test_the_random_state_is_left_alone() -> None:
    state = torch.get_rng_state()
    probe(lambda g, x: g.call_function(aten.sin.default, (x,)), 3, 4)
    assert torch.equal(state, torch.get_rng_state())


def test_draws_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after random ops, which start from one seed in every run."""
    seen: list[torch.Tensor] = []
    drawn = sample_probe._random

    def record(*args: object) -> torch.Tensor:
        seen.append(drawn(*args))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(sample_probe, "_random", record)
    assert probe(lambda g, x: g.call_function(aten.sin.default, (x,)), 3, 4) == 0
    inputs = [t for t in seen if t.shape == (3, 4)]
    assert len(inputs) == sample_probe.DRAWS
    assert all(not torch.equal(a, b) for i, a in enumerate(seen) for b in seen[i + 1 :])


def test_what_is_alike_for_all_samples() -> None:
    graph = fx.Graph()
    row = graph.placeholder("row")
    row.meta["val"] = torch.empty(1, 4)
    table = graph.placeholder("table")
    table.meta["val"] = torch.empty(9, 4)
    repeated = graph.call_function(aten.expand.default, (row, [3, 4]))
    rows = graph.call_function(aten.slice.Tensor, (table, 0, 0, 3))
    odd = graph.call_function(aten.slice.Tensor, (table, 0, 0, 4))
    assert sample_probe.alike(repeated, STATIC, 0, SAMPLES)
    assert not sample_probe.alike(rows, STATIC, 0, SAMPLES)
    assert not sample_probe.alike(odd, STATIC, 0, SAMPLES)
