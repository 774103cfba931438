"""Prices of pinned configurations: recomputation, sequence parallelism, repeated layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.cluster import Cluster
from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.passes.capture import capture
from autopar.workflow.configuration import Configuration
from autopar.workflow.evaluator import Evaluator, whole_chain
from autopar.workflow.prepare import prepare
from autopar.workflow.stand_in import Architecture, stand_in

HIDDEN, HEADS, SEQUENCE, BATCH, TP = 4096, 32, 1024, 4, 4
LAYERS = 6
SBH = SEQUENCE * BATCH * HIDDEN


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    """A GPT with attention written out, in bfloat16."""
    shape = Architecture(HIDDEN, HEADS, HEADS, 4 * HIDDEN, 1000, False, True, fused_attention=False)
    model, inputs = stand_in(shape, SEQUENCE, torch.bfloat16)
    program = capture(model, inputs, name="gpt", dtype=torch.bfloat16)
    return Evaluator(prepare(program, dict(program.sizes)))


BASE = Configuration(Cluster.parse("a100-80:1x8"), Mesh(1, 2, TP), SEQUENCE, BATCH, 2)


def layer(evaluator: Evaluator, configuration: Configuration):
    """The price of one layer on one rank."""
    chain = evaluator._chain(configuration, configuration.boundaries[-1])
    assert chain is not None
    return chain.blocks[1]


def test_activations_per_layer_follow_korthikanti(evaluator):
    # Korthikanti et al. 2022 without dropout: s b h (34 - 2 + (5 - 3) a s / h), of which the masks
    # are 2 + a s / h; dropout here keeps no mask, its input is the softmax, its output is kept.
    serial = layer(evaluator, replace(BASE, mesh=Mesh(1, 8, 1)))
    scores = HEADS * SEQUENCE / HIDDEN
    assert serial.saved_bytes / SBH == pytest.approx(32 + 4 * scores, rel=0.03)
    split = layer(evaluator, replace(BASE, sequence_parallel=True, regathers=True))
    assert split.saved_bytes / SBH * TP == pytest.approx(32 + 4 * scores, rel=0.03)
    kept = layer(evaluator, replace(BASE, sequence_parallel=True))
    # Two inputs of products, gathered: 4 s b h on every rank instead of a tp-th part of it.
    assert (kept.saved_bytes - split.saved_bytes) / SBH == pytest.approx(4 * (1 - 1 / TP), rel=0.03)


def test_cp_holds_a_part_of_the_sequence(evaluator):
    plain = replace(BASE, sequence_parallel=False)
    split = replace(plain, mesh=Mesh(1, 1, TP, 2))
    whole, part = (evaluator.predict(c) for c in (plain, split))
    assert part.flops_per_sample == pytest.approx(whole.flops_per_sample, rel=0.02)
    assert part.evaluation.time_breakdown["cp_comm"] > 0
    assert "cp_comm" not in whole.evaluation.time_breakdown
    # A rank keeps its half, and keys and values of all positions if it gathers them.
    kept = layer(evaluator, split).saved_bytes / layer(evaluator, plain).saved_bytes
    assert 0.5 <= kept < 0.6
    with pytest.raises(UsageError, match="cp=3: it does not divide the sequence of 1024"):
        evaluator.predict(replace(split, mesh=Mesh(1, 1, 2, 3)))


def test_core_recomputation_keeps_no_scores_and_repeats_attention(evaluator):
    plain = layer(evaluator, replace(BASE, mesh=Mesh(1, 8, 1)))
    core = layer(evaluator, replace(BASE, mesh=Mesh(1, 8, 1), recompute="core"))
    assert core.saved_bytes / SBH == pytest.approx(32, rel=0.03)
    again = core.backward_compute - plain.backward_compute
    assert 0 < again < plain.forward_compute
    assert core.forward_compute == plain.forward_compute


def test_products_keeps_every_second_product(evaluator):
    plain = layer(evaluator, replace(BASE, mesh=Mesh(1, 8, 1)))
    found = layer(evaluator, replace(BASE, mesh=Mesh(1, 8, 1), recompute="products"))
    # Input; query and value, mixed values (third of the two attention products), up and down.
    assert found.input_bytes < found.saved_bytes < plain.saved_bytes
    assert plain.backward_compute < found.backward_compute
    assert found.backward_compute < plain.backward_compute + plain.forward_compute


def test_layers_repeat_and_recomputation_orders_time_and_memory(evaluator):
    one = Evaluator.predict(evaluator, BASE, LAYERS)
    two = Evaluator.predict(evaluator, BASE, 2 * LAYERS)
    assert two.step_seconds > 1.6 * one.step_seconds
    assert two.flops_per_sample > 1.8 * one.flops_per_sample
    found = {
        policy: evaluator.predict(replace(BASE, recompute=policy), LAYERS)
        for policy in ("none", "core", "full")
    }
    seconds = [found[p].step_seconds for p in found]
    peaks = [found[p].footprint.allocated_bytes for p in found]
    assert seconds == sorted(seconds) and peaks == sorted(peaks, reverse=True)
    assert found["none"].footprint.reserved_bytes > found["none"].footprint.allocated_bytes


def test_the_faster_boundary_is_taken_where_it_is_open(evaluator):
    free = evaluator.predict(BASE, LAYERS)
    fixed = [
        evaluator.predict(replace(BASE, sequence_parallel=s), LAYERS).step_seconds
        for s in (False, True)
    ]
    assert free.step_seconds == min(fixed)


def test_what_the_model_cannot_do_is_refused(evaluator):
    with pytest.raises(UsageError, match="8 chunks, but the model has 6 layers"):
        bad = replace(BASE, mesh=Mesh(2, 4, 1), chunks=8, schedule="interleaved")
        evaluator.predict(bad, LAYERS)
    with pytest.raises(UsageError, match="can't be split over tp=4"):
        evaluator.predict(replace(BASE, sequence=510, sequence_parallel=True), LAYERS)


def test_chain_ends_stay_single(evaluator):
    chain = evaluator._chain(BASE, "R")
    blocks, ends = whole_chain(chain, LAYERS)
    assert ends == (1, 1) and len(blocks) == LAYERS + 2
    assert len({b.name for b in blocks}) == len(blocks)
    assert whole_chain(chain, None)[0] == list(chain.blocks)
