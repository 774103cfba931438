"""Only random ops on shards get numbers of their own."""

from __future__ import annotations

import torch
from torch import fx
from torch.testing import FileCheck

from autopar.passes.rewrite.own_random import own_random
from autopar.placement import Placement, Replicate, Shard
from autopar.runtime import collectives  # noqa: F401 - registers the ops


def dropouts(placement: Placement, probability: float = 0.1) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta = {"val": torch.empty(2, 4, device="meta"), "placement": placement}
    y = graph.call_function(torch.ops.aten.dropout.default, (x, probability, True))
    z = graph.call_function(torch.ops.aten.mul.Tensor, (y, y))
    for node in (y, z):
        node.meta = dict(x.meta)
    graph.output((z, y))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_shards_draw_their_own() -> None:
    graph = dropouts(Shard(1))
    own_random(graph)
    graph.graph.lint()
    FileCheck().check("own_random.default(x, 'tp')").check("dropout.default(own_random").check(
        "same_random.default(dropout_default, 'tp')"
    ).check("mul.Tensor(same_random").run(graph.code)
    FileCheck().check("return (mul_tensor, same_random_default)").run(graph.code)
    added = [n for n in graph.graph.nodes if "random" in n.name]
    assert all(n.meta["placement"] == Shard(1) for n in added)


def test_whole_values_and_ops_that_do_not_draw_stay() -> None:
    for graph in (dropouts(Replicate), dropouts(Shard(1), 0.0)):
        before = graph.code
        own_random(graph)
        assert graph.code == before
