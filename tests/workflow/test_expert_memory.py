"""What a plan predicts for a rank with experts against what its own program allocates."""

from __future__ import annotations

import pytest
from torch import nn

from autopar.op_call import OpCall
from autopar.passes.analysis import candidates
from autopar.program import Program
from autopar.rules.language import Rule
from autopar.rules.strategy import Strategy
from autopar.workflow.dry_memory import dry_memory
from tests.workflow.on_paper import planned, prepared

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
    return prepared(lambda: MixtralForCausalLM(config), 8, 128, "mixtral")


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
    plan = planned(program, 8, 64, f"{WAYS[factor]},microbatch=8,recompute=none")
    chosen = [s for b in plan.placements.values() for n, s in b.items() if n == "experts"]
    assert chosen == [f"shard {factor}"]
    predicted = plan.predicted["memory_per_stage"][0]["total"]
    found = dry_memory(model, program, plan, 0)
    assert abs(predicted / found.total - 1) <= MOST, (predicted, found)


OVER_REPLICAS = (
    "tp=1,dp=8,ep=8,zero=0",
    "tp=1,dp=8,ep=4,zero=1",
    "tp=1,dp=8,ep=2,zero=3",
    "tp=2,dp=4,ep=4,zero=2,weights=split",
    "tp=1,dp=8,ep=4,zero=3,shard=4",
)


SLOTS = (
    "tp=1,dp=8,ep=8,zero=0,microbatch=8,recompute=none",
    "tp=1,dp=8,ep=2,zero=3,microbatch=4,recompute=full",
    "tp=4,dp=2,zero=1,weights=split,microbatch=8,recompute=none",
)
# The table of slots.
FEW_BYTES = 1024


@pytest.mark.parametrize("pins", SLOTS)
def test_spare_slots(mixtral: tuple[nn.Module, Program], pins: str) -> None:
    """What two slots add to the prediction is what they add to the memory; and they cost time, for
    the sum over copies and the optimizer."""
    model, program = mixtral
    predicted, found, seconds = [], [], []
    for spare in (0, 2):
        plan = planned(program, 8, 64, pins, spare_experts=spare)
        predicted.append(plan.predicted["memory_per_stage"][0]["total"])
        seconds.append(plan.predicted["time_breakdown"])
        found.append(dry_memory(model, program, plan, 0).total)
    # Over tp, each rank has a slice of every expert here, and so no slots.
    if "ep=" in pins:
        assert seconds[1]["ep_comm"] > seconds[0]["ep_comm"]
        assert seconds[1]["optimizer"] > seconds[0]["optimizer"]
    assert abs((predicted[1] - predicted[0]) - (found[1] - found[0])) < FEW_BYTES
    assert abs(predicted[1] / found[1] - 1) <= MOST, (predicted, found)


@pytest.mark.parametrize("pins", OVER_REPLICAS)
@pytest.mark.parametrize("more", ["microbatch=8,recompute=none", "microbatch=4,recompute=full"])
def test_experts_that_replicas_split(
    mixtral: tuple[nn.Module, Program], pins: str, more: str
) -> None:
    model, program = mixtral
    plan = planned(program, 8, 64, f"{pins},{more}")
    predicted = plan.predicted["memory_per_stage"][0]["total"]
    found = dry_memory(model, program, plan, 0)
    assert abs(predicted / found.total - 1) <= MOST, (predicted, found)
