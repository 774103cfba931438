"""What may be split along the sequence, and how heads and weights are kept for tp."""

from __future__ import annotations

import torch
from torch import nn

from autopar.cluster import Cluster
from autopar.op_call import Bindings
from autopar.passes.analysis.blocks import analyse_blocks
from autopar.passes.analysis.candidates import candidates
from autopar.passes.analysis.sequence_candidates import sequence_candidates
from autopar.passes.capture import capture
from autopar.passes.rewrite.cut_blocks import cut_block
from tests.passes import sequence_toy
from tests.passes.expert_toys import library

DEVICE = Cluster.parse("h100:1x8").device
ATTENTION = "scaled_dot_product_attention"


def names(ranks: int, tp: int = 1, *, causal: bool = True) -> dict[str, list[str]]:
    graph, _ = sequence_toy.layer(causal=causal)
    text = graph.code
    found = sequence_candidates(graph, ranks, None, tp)
    assert graph.code == text
    return {node: [s.name for s in legal] for node, legal in found.strategies.items()}


def test_causal_attention_is_split_by_rows_only_along_the_sequence() -> None:
    graph, _ = sequence_toy.layer()
    plain = [s.name for s in candidates(graph, 2).strategies[ATTENTION]]
    assert "shard g" in plain and "shard q" not in plain
    found = sequence_candidates(graph, 2)
    ways = {s.name: s.local_op for s in found.strategies[ATTENTION]}
    assert ways["shard q"] == "attention_rows" and ways["shard g"] == ""
    local = {p.strategy.name: p.local for p in found.prices(ATTENTION, DEVICE)}
    assert local["shard q"].op_name == "attention_rows"
    assert local["shard q"].types[0].shape[-2] == 8 and local["shard q"].types[1].shape[-2] == 16


def test_rows_that_see_all_keys_need_no_op_of_their_own() -> None:
    graph, _ = sequence_toy.layer(causal=False)
    ways = {s.name: s.local_op for s in sequence_candidates(graph, 2).strategies[ATTENTION]}
    assert ways["shard q"] == ""


def test_heads_are_left_to_tp_where_there_are_not_enough_for_both() -> None:
    assert "shard g" in names(2)[ATTENTION]
    assert "shard g" not in names(2, tp=2)[ATTENTION] and "shard q" in names(2, tp=2)[ATTENTION]


def test_weights_stay_whole_and_losses_are_put_together() -> None:
    assert set(names(2)["linear"]) <= {"replicate", "replicate*", "shard b1", "partial 0,2"}
    program = sequence_toy.program()
    head = analyse_blocks(program).block("head")
    graph, _ = cut_block(program, head, Bindings(program.symbols, {**program.sizes, "batch": 1}))
    loss = {
        s.name: s.local_op for s in sequence_candidates(graph, 2).strategies["cross_entropy_loss"]
    }
    assert loss == {"replicate": "", "replicate*": "", "shard t": "loss_share"}


def test_ops_without_a_rule_are_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i0(self.inner(x)).sum()

    program = capture(Odd(), {"x": torch.ones(2, 4, 4)})
    blocks = analyse_blocks(program).chain
    block = next(b for b in blocks if any("special_i0" in n.name for n in b.nodes))
    graph, _ = cut_block(program, block, Bindings(program.symbols, program.sizes))
    found = sequence_candidates(graph, 2)
    assert found.unknown == ("aten.special_i0.default",)
    assert [s.name for s in found.strategies["special_i0"]] == ["replicate"]


def test_experts_are_split_by_tokens_alone() -> None:
    """Slices of experts are tp's task, and parts of them that of ep."""
    model, inputs = library("mixtral")
    program = capture(model, inputs, name="mixtral")
    bindings = Bindings(program.symbols, {**program.sizes, "batch": 2})
    blocks = analyse_blocks(program)
    graph, _ = cut_block(program, blocks.chain[1], bindings)
    found = sequence_candidates(graph, 2)
    (experts,) = [n for n, call in found.calls.items() if call.op_name == "experts"]
    ways = {s.name for s in found.strategies[experts]}
    assert "shard t" in ways and not ways & {"shard e", "shard i"}
