"""What a plan predicts for a rank against what the rank's own program allocates in a dry run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.api import search_program
from autopar.cluster import Cluster
from autopar.passes.capture import capture
from autopar.program import Program
from autopar.runtime.live_bytes import TERMS
from autopar.workflow.dry_memory import dry_memory
from autopar.workflow.model_costs import prepare

# Stage, pins, and what the prediction may be off by: it is to be above rather than below.
LAYOUTS = (
    (0, "dp=8,zero=0,recompute=none", 0.05),
    (0, "dp=8,zero=1,microbatches=2,recompute=none", 0.05),
    (0, "dp=8,zero=3,microbatches=2,recompute=none", 0.05),
    (0, "tp=8,weights=split,microbatches=2,recompute=none", 0.05),
    (0, "pp=2,tp=2,dp=2,zero=1,microbatches=4,weights=split,recompute=none", 0.05),
    (1, "pp=2,tp=4,microbatches=4,weights=split,recompute=full", 0.08),
)
LOWEST = -0.02


@pytest.fixture(scope="module")
def llama() -> tuple[nn.Module, Program]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        example = {n: torch.empty(4, 256, dtype=torch.int64) for n in ("input_ids", "labels")}
    program = capture(model, example, name="llama", dtype=torch.float32)
    return model, prepare(program, program.sizes)


@pytest.mark.parametrize(("stage", "pins", "above"), LAYOUTS)
def test_prediction_is_what_is_allocated(
    llama: tuple[nn.Module, Program], stage: int, pins: str, above: float
) -> None:
    model, program = llama
    outcome = search_program(
        program,
        Cluster.parse("cpu:8"),
        global_batch_size=32,
        pins=pins,
        memory_limit="1TiB",
        explain=False,
    )
    assert outcome.plan is not None
    predicted = outcome.plan.predicted["memory_per_stage"][stage]
    found = dry_memory(model, program, outcome.plan, stage)
    off = predicted["total"] / found.total - 1
    assert LOWEST <= off <= above, f"{off:+.1%}: {predicted}, {found}"
    for term in ("optimizer", "activations"):
        assert predicted[term] >= 0.98 * found.terms[term]
    assert set(found.terms) == set(TERMS)
