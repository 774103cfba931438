"""What a plan predicts for a rank against what the rank's own program allocates in a dry run."""

from __future__ import annotations

import pytest
from torch import nn

from autopar.program import Program
from autopar.runtime.live_bytes import TERMS
from autopar.workflow.dry_memory import dry_memory
from tests.workflow.on_paper import planned, prepared

KEPT = "dp=8,shard=8,zero=3,microbatches=2"
# Stage and pins.
LAYOUTS = (
    (0, "dp=8,zero=0,recompute=none"),
    (0, "dp=8,shard=8,zero=1,microbatches=2,recompute=none"),
    (0, "dp=8,shard=8,zero=3,microbatches=2,recompute=none"),
    (0, "dp=8,shard=8,zero=3,microbatches=2,recompute=full"),
    # Some blocks kept gathered.
    (0, f"{KEPT},recompute=full,reshard=embed+model.layers.0+model.layers.1"),
    (0, f"{KEPT},recompute=none,reshard=model.layers.0+model.layers.1"),
    (0, f"{KEPT},recompute=none,reshard=embed+model.layers.0+model.layers.1"),
    (0, "pp=2,dp=4,shard=4,zero=3,microbatches=4,recompute=full,schedule=1f1b,reshard=embed+head"),
    (1, "pp=2,dp=4,shard=4,zero=3,microbatches=4,recompute=none,schedule=1f1b,reshard=head"),
    (0, "dp=8,shard=4,zero=1,microbatches=2,recompute=none"),
    (0, "dp=8,shard=2,zero=3,microbatches=2,recompute=none"),
    (0, "pp=2,dp=4,shard=2,zero=3,microbatches=4,recompute=full,schedule=1f1b"),
    (0, "tp=8,weights=split,microbatches=2,recompute=none"),
    (0, "cp=2,dp=2,tp=2,shard=4,zero=1,microbatch=1,weights=split,recompute=full"),
    (0, "pp=2,tp=2,dp=2,zero=1,microbatches=4,weights=split,recompute=none,schedule=1f1b"),
    (0, "pp=2,dp=4,shard=4,zero=1,microbatches=2,recompute=none,schedule=1f1b"),
    (0, "pp=2,dp=4,shard=4,zero=3,microbatches=2,recompute=full,schedule=1f1b"),
    (1, "pp=2,tp=4,microbatches=4,weights=split,recompute=full,schedule=1f1b"),
    (0, "pp=2,tp=4,microbatches=4,weights=split,recompute=full,schedule=gpipe"),
    (0, "pp=2,dp=4,zero=0,microbatches=4,chunks=2,schedule=zero-bubble"),
    (1, "pp=2,dp=4,shard=4,zero=1,microbatches=4,chunks=2,schedule=zero-bubble"),
    (0, "pp=2,dp=4,shard=2,zero=1,microbatches=8,chunks=2,schedule=zero-bubble"),
    (1, "pp=2,tp=4,microbatches=8,weights=split,chunks=2,schedule=zero-bubble"),
    (1, "pp=2,dp=4,shard=4,zero=1,microbatches=4,chunks=1,schedule=zero-bubble"),
    (0, "pp=2,dp=4,zero=0,microbatches=4,schedule=zbv"),
    (1, "pp=2,tp=4,microbatches=8,weights=split,schedule=zbv"),
    (0, "pp=2,dp=4,shard=2,zero=1,microbatches=8,schedule=zbv"),
)
# A limit between that without recomputation and that of whole blocks: some run again in part.
IN_PART = ("dp=8,shard=8,zero=3,microbatches=2,recompute=selective", "44MiB")
# Total, and each term (of its own size, or of the total where it is small). GPipe's last layout is
# predicted 4.3 % too high: buffers of a recomputed backward.
MOST, GPIPE_MOST, TERM_MOST, TERM_OF_TOTAL = 0.02, 0.05, 0.1, 0.05
# Zero-bubble with hybrid sharding is 2.6 % too high (a gradient that is sent is gone by then); so
# is what is passed on where a V turns.
DIVIDED_MOST = 0.03


def small_llama(layers: int, vocabulary: int, sequence: int) -> tuple[nn.Module, Program]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        use_cache=False,
    )
    return prepared(lambda: LlamaForCausalLM(config), 4, sequence, "llama")


@pytest.fixture(scope="module")
def llama() -> tuple[nn.Module, Program]:
    return small_llama(layers=3, vocabulary=4096, sequence=256)


@pytest.mark.parametrize(("stage", "pins"), LAYOUTS)
def test_prediction_is_what_is_allocated(
    llama: tuple[nn.Module, Program], stage: int, pins: str
) -> None:
    model, program = llama
    plan = planned(program, 8, 32, pins)
    predicted = plan.predicted["memory_per_stage"][stage]
    found = dry_memory(model, program, plan, stage)
    off = predicted["total"] / found.total - 1
    schedule = pins.partition("schedule=")[2]
    above = {"gpipe": GPIPE_MOST, "zero-bubble": DIVIDED_MOST, "zbv": DIVIDED_MOST}
    assert -MOST <= off <= above.get(schedule, MOST), f"{off:+.1%}: {predicted}, {found}"
    for term, size in found.terms.items():
        most = max(TERM_MOST * size, TERM_OF_TOTAL * found.total)
        assert abs(predicted[term] - size) <= most, f"{term}: {predicted}, {found}"
    assert set(found.terms) == set(TERMS)


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw-8bit", "sgd-momentum", "adamw-host"])
@pytest.mark.parametrize("layout", [2, 5, 7])
def test_states_of_every_optimizer_are_what_is_allocated(
    llama: tuple[nn.Module, Program], optimizer: str, layout: int
) -> None:
    if optimizer == "adamw-8bit":
        pytest.importorskip("torchao.optim")
    model, program = llama
    stage, pins = LAYOUTS[layout]
    cluster = "h100:1x8" if optimizer == "adamw-host" else "cpu:8"
    plan = planned(program, 8, 32, pins, "70GiB", optimizer, cluster=cluster)
    predicted = plan.predicted["memory_per_stage"][stage]
    found = dry_memory(model, program, plan, stage)
    # To the byte, but for a step counter of each parameter.
    steps = found.terms["optimizer"] - predicted["optimizer"]
    assert 0 <= steps <= 4 * 30, f"{predicted}, {found}"
    assert predicted["total"] / found.total - 1 == pytest.approx(0, abs=MOST), found


def test_blocks_recomputed_in_part_take_what_is_predicted(
    llama: tuple[nn.Module, Program],
) -> None:
    model, program = llama
    pins, limit = IN_PART
    plan = planned(program, 8, 32, pins, limit)
    assert "in part" in plan.recompute_label
    predicted = plan.predicted["memory_per_stage"][0]["total"]
    found = dry_memory(model, program, plan, 0)
    assert predicted / found.total - 1 == pytest.approx(0, abs=MOST), found


@pytest.mark.parametrize("stage", [0, 1])
def test_ranks_that_draw_numbers_agree_on_nothing_in_a_dry_run(stage: int) -> None:
    """Every rank of a pipeline with dropout takes its seed from the first one; here there is none.

    torch's CPU kernel of dropout keeps a float32 mask where that of an accelerator, which is
    priced, keeps a byte: activations come out larger by three bytes for each of its elements.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 512, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64}
    config = GPT2Config(**sizes, use_cache=False)
    model, program = prepared(lambda: GPT2LMHeadModel(config).train(), 4, 64, "gpt2")
    plan = planned(program, 2, 8, "pp=2,microbatches=2,recompute=none,schedule=1f1b")
    predicted = plan.predicted["memory_per_stage"][stage]
    found = dry_memory(model, program, plan, stage)
    masks = found.terms["activations"] - predicted["activations"]
    assert 0 < masks < 0.5 * found.terms["activations"], (predicted, found)
    for term in ("parameters", "optimizer"):
        assert found.terms[term] == pytest.approx(predicted[term], rel=0.01)


@pytest.fixture(scope="module")
def deep() -> tuple[nn.Module, Program]:
    """Ten layers, and few tokens: memory is parameters and what follows from them."""
    return small_llama(layers=10, vocabulary=1024, sequence=16)


@pytest.mark.parametrize("microbatches", [2, 4])
@pytest.mark.parametrize("stage", [0, 1])
def test_chunks_that_are_done_hold_shards(
    deep: tuple[nn.Module, Program], stage: int, microbatches: int
) -> None:
    """With one round of micro-batches a chunk is through before the next one begins: it was 24 %
    too high as long as its whole gradients counted to the end of the step."""
    model, program = deep
    pins = f"pp=2,dp=2,shard=2,zero=1,microbatches={microbatches},chunks=3,schedule=interleaved"
    plan = planned(program, 4, 16, f"{pins},recompute=full")
    predicted = plan.predicted["memory_per_stage"][stage]
    found = dry_memory(model, program, plan, stage)
    assert predicted["total"] / found.total - 1 == pytest.approx(0, abs=0.01), (predicted, found)
    for term in ("parameters", "gradients", "optimizer"):
        assert found.terms[term] == pytest.approx(predicted[term], rel=0.01)


@pytest.mark.parametrize("zero", [1, 2])
def test_the_first_of_two_backwards_can_be_the_fullest(zero: int) -> None:
    """In the second, the last, the head has given back what was gathered of it when the embedding
    makes its gradient; in the first it has not, and was 7 % too low while only the second
    counted."""
    model, program = small_llama(layers=4, vocabulary=8192, sequence=16)
    pins = f"dp=4,shard=4,zero={zero},microbatches=2,recompute=full"
    plan = planned(program, 4, 8, pins)
    predicted = plan.predicted["memory_per_stage"][0]
    found = dry_memory(model, program, plan, 0)
    assert predicted["total"] / found.total - 1 == pytest.approx(0, abs=0.01), (predicted, found)
    if zero == 2:
        assert found.moment == "backward 1"


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_parameters_arrive_in_buffers(zero: int, recompute: str) -> None:
    """With few tokens and one micro-batch ZeRO-1 and 2 are fullest in the forward: a layer's
    parameters are copied out of the buffer that they came in, and that of the layer before is still
    there (6 % too low while one buffer counted)."""
    model, program = small_llama(layers=4, vocabulary=256, sequence=8)
    plan = planned(program, 4, 4, f"dp=4,shard=4,zero={zero},microbatches=1,recompute={recompute}")
    predicted = plan.predicted["memory_per_stage"][0]
    found = dry_memory(model, program, plan, 0)
    assert predicted["total"] / found.total - 1 == pytest.approx(0, abs=0.01), (predicted, found)
    for term in ("parameters", "gradients", "optimizer"):
        assert found.terms[term] == pytest.approx(predicted[term], rel=0.01)
    assert found.moment.startswith("forward") == (zero < 3)
