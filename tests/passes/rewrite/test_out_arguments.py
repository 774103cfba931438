"""`out=` becomes a copy: the same values, and one write that `functionalize` knows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from autopar.passes.rewrite.functionalize import functionalize
from autopar.passes.rewrite.out_arguments import replace_out_arguments

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def divided(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.div(x, 2.0 * x.abs() + 1, out=kept) * x


def scaled(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    torch.add(x, x, alpha=3, out=kept)
    return kept.sum() + x


def product(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, x.t() @ x, out=kept).exp()


@pytest.mark.parametrize("function", [divided, scaled, product])
def test_same_values_without_an_out_argument(function: Function) -> None:
    x, kept = torch.randn(4, 3), torch.zeros(4, 3)
    module = make_fx(function, tracing_mode="fake", pre_dispatch=True)(x, kept)
    assert any("out" in n.kwargs for n in module.graph.nodes)
    state = module.graph.find_nodes(op="placeholder")[1]
    replace_out_arguments(module.graph)
    module.graph.lint()
    assert not any("out" in n.kwargs for n in module.graph.nodes)
    module.recompile()
    mine, theirs = kept.clone(), kept.clone()
    torch.testing.assert_close(module(x, mine), function(x, theirs))
    torch.testing.assert_close(mine, theirs)
    assert list(functionalize(module.graph, [state])) == [state]


def test_ops_without_one_are_left() -> None:
    module = make_fx(lambda x: torch.add(x, x, alpha=2))(torch.ones(2))
    before = str(module.graph)
    replace_out_arguments(module.graph)
    assert str(module.graph) == before
