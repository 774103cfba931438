"""Random ops are told apart from those that only could be random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autopar.passes.analysis.random_ops import any_draws, draws, without_drawing

aten = torch.ops.aten


def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    graph = fx.Graph()
    x = graph.placeholder("x")
    return graph.call_function(target, (x, *args), kwargs)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (call(aten.dropout.default, 0.1, True), True),
        (call(aten.dropout.default, 0.0, True), False),
        (call(aten.dropout.default, 0.1, False), False),
        (call(aten.dropout.default, p=0.1, train=True), True),
        (call(aten.bernoulli.default), True),
        (call(aten.rand_like.default), True),
        (call(aten.sin.default), False),
        (call(aten.scaled_dot_product_attention.default, None, None), False),
        (call(aten.scaled_dot_product_attention.default, None, None, None, 0.1), True),
        (call(aten.scaled_dot_product_attention.default, None, None, dropout_p=0.1), True),
    ],
)
def test_draws(node: fx.Node, expected: bool) -> None:
    assert draws(node) is expected
    args, kwargs = without_drawing(node)
    optional = expected and "dropout" in str((node.target, kwargs)) or len(node.args) > 4
    if optional:
        quiet = node.graph.call_function(node.target, args, kwargs)
        assert not draws(quiet)
    assert any_draws([None, fx.GraphModule(torch.nn.Module(), node.graph)]) is expected
