"""Local shapes: size arguments, local forms of ops, and results as placements say."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch.testing import FileCheck

from autopar.errors import PassError
from autopar.passes.rewrite.insert_collectives import insert_collectives
from autopar.passes.rewrite.localize_shapes import localize_shapes
from autopar.passes.rewrite.place import place
from autopar.placement import Replicate, Shard
from autopar.rules.strategy import Strategy
from tests.passes import toys


def localised(name: str, kind: str, chosen: dict[str, str], boundary: str = "R") -> fx.GraphModule:
    graph, slots = toys.block(name, kind)
    place(kind, graph, slots, chosen, toys.placement(boundary), 2)
    insert_collectives(graph, toys.placement(boundary), 2)
    localize_shapes(graph, 2)
    return graph


def node(graph: fx.GraphModule, name: str) -> fx.Node:
    return next(n for n in graph.graph.nodes if n.name == name)


HEADS = {
    "parameter self_attn.q_proj.weight": "S(0)",
    "parameter self_attn.k_proj.weight": "S(0)",
    "parameter self_attn.v_proj.weight": "S(0)",
    "linear": "shard n",
    "linear.1": "shard n",
    "linear.2": "shard n",
    "view": "shard f2",
    "view.1": "shard f2",
    "view.2": "shard f2",
}


def test_heads_of_a_view_are_local() -> None:
    graph = localised("llama", "model.layers.0", HEADS)
    FileCheck().check("view.default(linear, [4, 16, 2, 8])").run(graph.code)
    assert node(graph, "view").meta["global_shape"] == (4, 16, 4, 8)
    assert tuple(node(graph, "p_model_layers_0_self_attn_q_proj_weight").meta["val"].shape) == (
        16,
        32,
    )


def test_a_split_vocabulary_gets_its_own_ops() -> None:
    graph = localised("mlp", "embed", {"parameter weight": "S(0)", "embedding": "shard v"})
    FileCheck().check("autopar.vocab_embedding.default(p_embed_weight, ids, -1, 2, 'tp')").run(
        graph.code
    )
    head = {
        "parameter weight": "S(0)",
        "linear": "shard n",
        "view": "shard f2",
        "cross_entropy_loss": "shard c",
    }
    graph = localised("mlp", "head", head)
    FileCheck().check("view.default(linear_4, [32, 16])").check(
        "autopar.vocab_cross_entropy.default(view, view_1, -100, 0.0, 2, 'tp')"
    ).run(graph.code)


def test_a_smoothed_loss_over_a_split_vocabulary_stays_smoothed() -> None:
    graph = fx.Graph()
    x, t = graph.placeholder("x"), graph.placeholder("t")
    target = torch.ops.aten.cross_entropy_loss.default
    y = graph.call_function(target, (x, t, None, 1, -100, 0.1))
    graph.output((y,))
    strategy = Strategy("shard c", (Shard(1), Replicate), Replicate, 0.5, "vocab_cross_entropy")
    x.meta = {"val": torch.empty(4, 8, device="meta"), "placement": Shard(1)}
    t.meta = {"val": torch.empty(4, dtype=torch.long, device="meta"), "placement": Replicate}
    y.meta = {
        "val": torch.empty((), device="meta"),
        "placement": Replicate,
        "strategy": strategy,
    }
    module = fx.GraphModule(torch.nn.Module(), graph)
    localize_shapes(module, 2)
    FileCheck().check("vocab_cross_entropy.default(x, t, -100, 0.1, 2, 'tp')").run(module.code)


def test_a_split_batch_of_tokens_gets_its_own_loss() -> None:
    graph = localised("mlp", "head", {"cross_entropy_loss": "shard t"})
    FileCheck().check("autopar.token_cross_entropy.default(").check("-100, 2, 'tp')").run(
        graph.code
    )


def test_unflatten_gets_local_sizes() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(torch.ops.aten.unflatten.int, (x, -1, [4, 2]))
    graph.output((y,))
    x.meta = {"val": torch.empty(3, 8, device="meta"), "placement": Shard(1)}
    y.meta = {
        "val": torch.empty(3, 4, 2, device="meta"),
        "placement": Shard(1),
        "strategy": Strategy("shard f1", (Shard(1),), Shard(1)),
    }
    module = fx.GraphModule(torch.nn.Module(), graph)
    localize_shapes(module, 2)
    FileCheck().check("unflatten.int(x, -1, [2, 2])").run(module.code)


def test_the_groups_of_a_convolution_are_those_of_a_rank() -> None:
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    target = torch.ops.aten.conv1d.default
    y = graph.call_function(target, (x, w, None, [1], [0], [1], 4))
    graph.output((y,))
    strategy = Strategy("shard g", (Shard(1), Shard(0)), Shard(1), divided=("groups",))
    x.meta = {"val": torch.empty(2, 8, 5, device="meta"), "placement": Shard(1)}
    w.meta = {"val": torch.empty(4, 2, 3, device="meta"), "placement": Shard(0)}
    y.meta = {
        "val": torch.empty(2, 4, 3, device="meta"),
        "placement": Shard(1),
        "strategy": strategy,
    }
    module = fx.GraphModule(torch.nn.Module(), graph)
    localize_shapes(module, 2)
    FileCheck().check("conv1d.default(x, w, None, [1], [0], [1], 2)").run(module.code)


def test_one_rank_keeps_the_graph() -> None:
    graph, slots = toys.block("mlp", "layers.0")
    text = graph.code
    place("layers.0", graph, slots, {}, Replicate, 1)
    localize_shapes(graph, 1)
    assert graph.code == text
    assert node(graph, "linear").meta["global_shape"] == (4, 8, 64)


def test_a_rule_that_lies_is_found() -> None:
    graph, slots = toys.block("mlp", "layers.0")
    place("layers.0", graph, slots, {}, Replicate, 2)
    node(graph, "gelu").meta["placement"] = Shard(2)
    with pytest.raises(
        PassError, match=r"gelu is \[\(4, 8, 64\)\] on a rank, its placement S\(2\)"
    ):
        localize_shapes(graph, 2)
    graph, slots = toys.block("mlp", "layers.0")
    place("layers.0", graph, slots, {"parameter up.weight": "S(1)"}, Replicate, 2)
    with pytest.raises(PassError, match="linear can't run on the local shapes") as info:
        localize_shapes(graph, 2)
    assert "toys.py" in info.value.message
