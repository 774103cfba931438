"""What runs again under other frameworks' policies, priced op by op."""

from __future__ import annotations

import pytest
from torch import nn

from autopar.axis import Axis
from autopar.cluster import Cluster
from autopar.passes.analysis.roofline import COMMUNICATION, roofline
from autopar.placement import Replicate
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.selective_recompute import with_selective_recompute
from tests.workflow.on_paper import prepared


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_local_experts": 4}
    shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
    return MixtralForCausalLM(MixtralConfig(**sizes, **shape, use_cache=False))


def test_experts_that_run_again_exchange_rows_again() -> None:
    _, program = prepared(mixtral, 4, 16, "mixtral")
    cluster = Cluster.parse("h100:1x8")
    costs = ModelCosts(program, cluster, program.sizes).over(1, 1, 4)
    chain = costs.whole(4)
    block = next(b for b in chain.blocks if b.forward_ep)
    graph, slots = costs.placed_graph(block.kind, 1, 4, {}, Replicate)
    axis = Axis(1, 1, cluster, 1)
    again = with_selective_recompute(block, graph, slots, axis, "products")
    prices = roofline(graph, axis)
    (sent,) = [p for p in prices if p.cost.bound == COMMUNICATION and p.op == "all_to_all"]
    (experts,) = [p for p in prices if p.node == sent.node and p is not sent]
    # Of what is dear, those alone run again: attention and every second product are kept.
    rest = block.forward - sent.cost.forward_seconds - experts.cost.forward_seconds
    extra = again.backward_compute - block.backward_compute
    least = sent.cost.forward_seconds + experts.cost.forward_seconds
    assert sent.cost.forward_seconds == pytest.approx(block.forward_ep) and block.forward_ep > 0
    assert least < extra < least + rest
