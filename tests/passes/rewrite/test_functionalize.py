"""Writes in place become values: the graph computes the same, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.analysis.aliases import written
from autopar.passes.rewrite.functionalize import functionalize

Function = Callable[[torch.Tensor], torch.Tensor]


def rows(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4, 3)
    for index in range(4):
        out[index] = x[index] * index
    return out * 2


def view_of_a_view(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    corner = out[1:3]
    corner[:, 0] = 7
    corner.add_(1)
    return out + corner.sum()


def read_between(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    first = out[0]
    before = first * 1
    out.mul_(3)
    return before + first + out.sum()


def transposed(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out.t()[0].zero_()
    out.unsqueeze(0).add_(2)
    out.view(-1)[2] = 9
    return out


def copy_with_cast(x: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(4, 3, dtype=torch.float64)
    out.copy_(x)
    out[:, 1] = torch.ones(4)
    return out


def own_source(x: torch.Tensor) -> torch.Tensor:
    a, b = x.clone(), torch.zeros(4, 3)
    b.copy_(a)
    a.add_(1)
    return a * b


def traced(function: Function, x: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake", pre_dispatch=True)(x)


@pytest.mark.parametrize(
    "function", [rows, view_of_a_view, read_between, copy_with_cast, own_source]
)
def test_same_value_and_no_write(function: Function) -> None:
    x = torch.randn(4, 3)
    module = traced(function, x)
    assert any(written(n) for n in module.graph.nodes)
    functionalize(module.graph, [])
    module.graph.lint()
    module.recompile()
    assert not [n for n in module.graph.nodes if written(n)]
    torch.testing.assert_close(module(x), function(x))


def test_a_view_without_inverse_keeps_its_writes() -> None:
    x = torch.randn(4, 3)
    module = traced(transposed, x)
    functionalize(module.graph, [])
    module.recompile()
    torch.testing.assert_close(module(x), transposed(x))


def test_state_is_returned_and_other_placeholders_are_left() -> None:
    def counts(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x * count

    module = make_fx(counts, tracing_mode="fake", pre_dispatch=True)(torch.ones(2), torch.zeros(()))
    state = [n for n in module.graph.nodes if n.op == "placeholder"][1]
    updates = functionalize(module.graph, [state])
    assert list(updates) == [state] and not updates[state].users
    assert not [n for n in module.graph.nodes if written(n)]

    module = make_fx(counts, tracing_mode="fake", pre_dispatch=True)(torch.ones(2), torch.zeros(()))
    assert functionalize(module.graph, []) == {}
    assert [n for n in module.graph.nodes if written(n)]


def test_a_write_with_named_arguments_and_a_running_mean() -> None:
    def follows(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        mean.mul_(0.9).add_(x.sum(), alpha=0.1)
        return x - mean

    module = make_fx(follows, tracing_mode="fake", pre_dispatch=True)(torch.ones(2), torch.ones(()))
    state = [n for n in module.graph.nodes if n.op == "placeholder"][1]
    assert list(functionalize(module.graph, [state])) == [state]
    assert not [n for n in module.graph.nodes if written(n)]
    module.recompile()
    x, mean = torch.randn(2), torch.tensor(3.0)
    torch.testing.assert_close(module(x, mean), follows(x, mean.clone()))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: x.new_empty((4, 1)).bernoulli_(0.5),
        lambda x: x.new_empty((4, 1)).bernoulli_(),
        lambda x: torch.zeros(4, 3).uniform_(1, 2),
        lambda x: torch.zeros(4, 3).normal_(2, 3),
        lambda x: torch.zeros(4, 3).exponential_(),
        lambda x: torch.zeros(4, 3).random_(9),
        lambda x: torch.zeros(4, 3)[:, 1:].uniform_().sum(1, keepdim=True),
    ],
)
def test_draws_in_place_are_values_with_the_same_numbers(draw: Function) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return x * draw(x)

    x = torch.randn(4, 3)
    module = traced(function, x)
    functionalize(module.graph, [])
    module.recompile()
    assert not [n for n in module.graph.nodes if written(n)]
    torch.manual_seed(3)
    expected = function(x)
    torch.manual_seed(3)
    torch.testing.assert_close(module(x), expected)
