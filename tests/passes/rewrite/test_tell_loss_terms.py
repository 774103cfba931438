"""Auxiliary terms of the loss become results of the last block."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.testing import FileCheck

import autopar.runtime.collectives  # noqa: F401 - registers the ops
from autopar.passes.rewrite.tell_loss_terms import tell_loss_terms
from autopar.program import outputs_of

_aten = torch.ops.aten
WANTED = {"balance": "its line"}


def block(*, inside: bool) -> fx.GraphModule:
    """loss + balance, on tp ranks that hold terms of both; or of the loss alone, `inside`."""
    graph = fx.Graph()
    value = {"val": torch.empty((), device="meta"), "requires_grad": True}

    def node(name: str, target: Any, *args: Any, **more: Any) -> fx.Node:
        made = graph.create_node("call_function", target, args, {}, name)
        made.meta = {**value, **more}
        return made

    loss, router = graph.placeholder("part"), graph.placeholder("router")
    loss.meta, router.meta = dict(value), dict(value)
    balance = node("balance", _aten.mul.Tensor, router, 0.1)
    reduce: Any = torch.ops.autopar.all_reduce.default
    if inside:
        loss = node("reduced", reduce, loss, "tp", reshard=None)
    total = node("total", _aten.add.Tensor, loss, balance)
    if not inside:
        total = node("reduced", reduce, total, "tp", reshard=None)
    graph.output((total,))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_what_ranks_do_to_the_sum_they_do_to_its_term() -> None:
    graph = block(inside=False)
    assert tell_loss_terms(graph, 0, WANTED) == ["its line"]
    graph.graph.lint()
    FileCheck().check("reduced =").check("detach.default(balance)").check(
        "all_reduce.default(detach"
    ).run(graph.code)
    first, told = outputs_of(graph.graph)
    assert first.name == "reduced" and told.args[1] == "tp"


def test_a_term_that_is_whole_is_handed_out_as_it_is() -> None:
    graph = block(inside=True)
    assert tell_loss_terms(graph, 0, WANTED) == ["its line"]
    loss, told = outputs_of(graph.graph)
    assert loss.name == "total" and told.all_input_nodes[0].name == "balance"
    assert "all_reduce" not in str(told.target)


def test_a_term_that_is_not_in_the_sum_is_not_told() -> None:
    graph = block(inside=True)
    assert tell_loss_terms(graph, 0, {"router": "router"}) == []
    assert len(outputs_of(graph.graph)) == 1


def value_of(build: Any, wanted: dict[str, str]) -> tuple[float, dict[str, float]]:
    """The sum that `build` makes of loss = 2, a = 3 and b = 5, and its told terms."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("loss", "a", "b")]

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        made.meta = {"val": torch.empty((), device="meta"), "requires_grad": True}
        return made

    for node in inputs:
        node.meta = {"val": torch.empty((), device="meta"), "requires_grad": True}
    graph.output((build(call, *inputs),))
    module = fx.GraphModule(torch.nn.Module(), graph)
    names = tell_loss_terms(module, 0, wanted)
    module.graph.lint()
    total, *told = module(*map(torch.tensor, (2.0, 3.0, 5.0)))
    return float(total), dict(zip(names, map(float, told), strict=True))


def from_zero(call: Any, loss: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
    total = call(_aten.add.Tensor, call(_aten.add.Tensor, a, 0), b)
    return call(_aten.add.Tensor, loss, total)  # type: ignore[no-any-return]


def twice(call: Any, loss: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
    total = call(_aten.add.Tensor, call(_aten.add.Tensor, loss, a), a)
    return call(_aten.sub.Tensor, total, b)  # type: ignore[no-any-return]


def scaled(call: Any, loss: fx.Node, a: fx.Node, b: fx.Node) -> fx.Node:
    total = call(_aten.neg.default, call(_aten.add.Tensor, loss, a, alpha=0.5))
    total = call(_aten.div.Tensor, call(_aten.sub.Tensor, total, b, alpha=3), 4)
    return call(_aten.rsub.Scalar, total, 7)  # type: ignore[no-any-return]


def test_terms_have_the_value_that_they_have_in_the_sum() -> None:
    both = {"a": "a", "b": "b"}
    assert value_of(from_zero, both) == (10, {"a": 3, "b": 5})
    assert value_of(twice, both) == (3, {"a": 6, "b": -5})
    assert value_of(scaled, both) == (7 + (3.5 + 15) / 4, {"a": 1.5 / 4, "b": 15 / 4})


def test_terms_of_one_name_are_numbered() -> None:
    assert value_of(twice, {"a": "x", "b": "x"}) == (3, {"x": 6, "x #2": -5})


def test_a_term_of_two_tensors_does_not_keep_how_it_was_placed() -> None:
    graph = block(inside=True)
    balance = next(n for n in graph.graph.nodes if n.name == "balance")
    balance.meta |= {"strategy": "of two operands", "placement": "R"}
    assert tell_loss_terms(graph, 0, WANTED) == ["its line"]
    told = outputs_of(graph.graph)[1]
    assert "strategy" not in told.meta and told.meta["placement"] == "R"
