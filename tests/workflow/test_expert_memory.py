"""What a plan predicts for a rank with experts against what its own program allocates."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.api import search_program
from autopar.cluster import Cluster
from autopar.op_call import OpCall
from autopar.passes.analysis import candidates
from autopar.passes.capture import capture
from autopar.program import Program
from autopar.rules.language import Rule
from autopar.rules.strategy import Strategy
from autopar.workflow.dry_memory import dry_memory
from autopar.workflow.model_costs import prepare

MOST = 0.05
WAYS = {
    "e": "tp=4,dp=2,weights=split",
    "i": "tp=4,dp=2,weights=split",
    "t": "tp=4,dp=2",
    "t,e": "tp=4,dp=2,weights=split",
}


@pytest.fixture(scope="module")
def mixtral() -> tuple[nn.Module, Program]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=8,
        max_position_embeddings=128,
        use_cache=False,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
        example = {n: torch.empty(8, 128, dtype=torch.int64) for n in ("input_ids", "labels")}
    program = capture(model, example, name="mixtral", dtype=torch.float32)
    return model, prepare(program, program.sizes)


@pytest.mark.parametrize("factor", WAYS)
def test_prediction_is_what_is_allocated(
    mixtral: tuple[nn.Module, Program], factor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = candidates.strategies

    def only(op: OpCall, rule: Rule | None, ranks: int) -> list[Strategy]:
        legal = every(op, rule, ranks)
        wanted = [s for s in legal if s.name == f"shard {factor}"]
        return legal[:1] + wanted if op.op_name == "experts" else legal

    monkeypatch.setattr(candidates, "strategies", only)
    model, program = mixtral
    outcome = search_program(
        program,
        Cluster.parse("cpu:8"),
        global_batch_size=64,
        pins=f"{WAYS[factor]},microbatch=8,recompute=none",
        memory_limit="1TiB",
        explain=False,
    )
    assert outcome.plan is not None
    chosen = [s for b in outcome.plan.placements.values() for n, s in b.items() if n == "experts"]
    assert chosen == [f"shard {factor}"]
    predicted = outcome.plan.predicted["memory_per_stage"][0]["total"]
    found = dry_memory(model, program, outcome.plan, 0)
    assert abs(predicted / found.total - 1) <= MOST, (predicted, found)
