"""Every layer of a kind has its load on the kind's one graph."""

from __future__ import annotations

from autopar.op_call import STATIC, op_call
from autopar.passes.analysis.assumed_load import annotate_load
from autopar.passes.rewrite.split_experts import expert_calls
from autopar.program import copy_graph
from tests.passes.expert_block import mixtral_layer

BLOCKS = ("model.layers.0", "model.layers.1", "model.layers.2")
EVEN = (0.25,) * 4


def test_layers_by_the_name_of_their_block() -> None:
    kind = mixtral_layer()
    graph = copy_graph(kind.graph)
    load = {"model.layers.1.mlp.experts": (0.7, 0.1, 0.1, 0.1), "other": EVEN}
    annotate_load(graph, "model.layers.0", BLOCKS, load)
    (node,) = expert_calls(graph)
    assert op_call(node, STATIC).expert_load == (EVEN, (0.7, 0.1, 0.1, 0.1), EVEN)


def test_no_load_of_these_layers() -> None:
    graph = copy_graph(mixtral_layer().graph)
    annotate_load(graph, "model.layers.0", BLOCKS, {"other": EVEN})
    (node,) = expert_calls(graph)
    assert op_call(node, STATIC).expert_load == ()
