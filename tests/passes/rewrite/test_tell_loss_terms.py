"""Auxiliary terms of the loss become results of the last block."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.testing import FileCheck

import autopar.runtime.collectives  # noqa: F401 - registers the ops
from autopar.passes.analysis.loss_terms import LossTerm
from autopar.passes.rewrite.tell_loss_terms import tell_loss_terms
from autopar.program import outputs_of

_aten = torch.ops.aten
WANTED = (LossTerm("balance", "balance"),)


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
    assert tell_loss_terms(graph, 0, WANTED) == WANTED
    graph.graph.lint()
    FileCheck().check("reduced =").check("detach.default(balance)").check(
        "all_reduce.default(detach"
    ).run(graph.code)
    first, told = outputs_of(graph.graph)
    assert first.name == "reduced" and told.args[1] == "tp"


def test_a_term_that_is_whole_is_handed_out_as_it_is() -> None:
    graph = block(inside=True)
    assert tell_loss_terms(graph, 0, WANTED) == WANTED
    loss, told = outputs_of(graph.graph)
    assert loss.name == "total" and told.all_input_nodes[0].name == "balance"
    assert "all_reduce" not in str(told.target)


def test_a_term_that_is_not_in_the_sum_is_not_told() -> None:
    graph = block(inside=True)
    assert tell_loss_terms(graph, 0, (LossTerm("router", "router"),)) == ()
    assert len(outputs_of(graph.graph)) == 1
