"""FLOPs of whole models, forward and backward, equal what torch counts on the models themselves."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.op_call import Bindings
from autopar.passes.analysis.flops import graph_flops
from autopar.passes.rewrite.cut_blocks import cut_shared
from autopar.passes.rewrite.insert_collectives import insert_collectives
from autopar.passes.rewrite.localize_shapes import localize_shapes
from autopar.passes.rewrite.place import place
from tests.passes import toys

ATTENTION = "scaled_dot_product_attention"


def ours(name: str) -> tuple[float, float, float]:
    """Of the whole model: forward, backward, and the attention's part of the forward."""
    found = toys.blocks(name)
    forward = backward = attention = 0.0
    graphs = [toys.block(name, b.name)[0] for b in found.chain]
    program = toys.simplified(name)
    shared = cut_shared(program, found, Bindings(program.symbols, program.sizes))
    for graph in [*graphs, shared]:
        for node, (f, b) in graph_flops(graph).items() if graph is not None else ():
            forward += f
            backward += b
            attention += f if getattr(node.target, "_opname", "") == ATTENTION else 0.0
    return forward, backward, attention


@pytest.mark.parametrize("name", ["mlp", "tied", "llama", "gpt2", "qwen3", "gemma2"])
def test_equal_to_torchs_counter(name: str) -> None:
    # torch does not count the fused CPU kernel, so attention runs unfused: two products forward
    # and their four gradients. We count a fused backward, which computes the scores once more:
    # five products.
    model, inputs = toys.model(name)
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        loss = model(**inputs)
        loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    measured = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    forward, backward, attention = ours(name)
    assert forward == measured
    assert backward - 0.5 * attention == counter.get_total_flops()


def test_fused_attention_counts_as_torch_counts_its_kernel() -> None:
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    graph, _ = toys.block("llama", "model.layers.0")
    node = next(n for n in graph.graph.nodes if getattr(n.target, "_opname", "") == ATTENTION)
    q, k, v = (tuple(a.meta["val"].shape) for a in node.args[:3])
    assert graph_flops(graph)[node] == (
        sdpa_flop_count(q, k, v),
        sdpa_backward_flop_count(q, q, k, v),
    )


def test_frozen_factors_have_no_gradient_product() -> None:
    graph, _ = toys.block("mlp", "layers.0")
    linear = next(n for n in graph.graph.nodes if n.name == "linear")
    forward, backward = graph_flops(graph)[linear]
    assert backward == 2 * forward
    linear.args[1].meta["requires_grad"] = False
    assert graph_flops(graph)[linear] == (forward, forward)


def test_a_rank_does_its_share() -> None:
    graph, slots = toys.block("mlp", "layers.0")
    whole = {n.name: f for n, f in graph_flops(graph).items()}
    place("layers.0", graph, slots, toys.MEGATRON, toys.placement("R"), 2)
    insert_collectives(graph, toys.placement("R"), 2)
    localize_shapes(graph, 2)
    local = {n.name: f for n, f in graph_flops(graph).items()}
    assert local["linear"] == tuple(f / 2 for f in whole["linear"])
    assert local["linear_1"] == tuple(f / 2 for f in whole["linear_1"])


def test_the_graph_is_not_changed() -> None:
    graph, _ = toys.block("mlp", "layers.0")
    text = graph.code
    graph_flops(graph)
    assert graph.code == text
