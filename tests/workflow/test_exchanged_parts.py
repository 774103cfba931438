"""Experts whose rows are exchanged by parts over tp: less between nodes, more inside of one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.cluster import Cluster
from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.passes.capture import capture
from autopar.workflow.configuration import Configuration
from autopar.workflow.evaluator import Evaluator
from autopar.workflow.prepare import prepare
from autopar.workflow.stand_in import Architecture, stand_in

SHAPE = Architecture(2048, 16, 16, 4096, 1000, True, False, experts=8, topk=2)
BASE = Configuration(
    Cluster.parse("h100:4x8"), Mesh(1, 8, 4, 1, 8), 1024, 4, 1, zero=1, sequence_parallel=True
)


@pytest.fixture(scope="module")
def evaluator() -> Evaluator:
    model, inputs = stand_in(SHAPE, 1024, torch.bfloat16)
    program = capture(model, inputs, name="experts", dtype=torch.bfloat16)
    return Evaluator(prepare(program, dict(program.sizes)))


def comm(evaluator: Evaluator, configuration: Configuration) -> dict[str, float]:
    return dict(evaluator.predict(configuration, 4).evaluation.time_breakdown)


def test_across_nodes_parts_are_faster(evaluator: Evaluator) -> None:
    whole, parts = (comm(evaluator, replace(BASE, exchanges_parts=p)) for p in (False, True))
    assert 0 < parts["ep_comm"] < whole["ep_comm"]
    assert parts["tp_comm"] < whole["tp_comm"]  # tokens are not gathered for it
    assert parts["compute"] == whole["compute"]


def test_without_tp_there_are_no_parts(evaluator: Evaluator) -> None:
    alone = replace(BASE, mesh=Mesh(1, 32, 1, 1, 8))
    assert comm(evaluator, alone) == comm(evaluator, replace(alone, exchanges_parts=True))


def test_ep_holds_a_part_of_the_experts(evaluator: Evaluator) -> None:
    found = {ep: evaluator.predict(replace(BASE, mesh=Mesh(1, 8, 4, 1, ep)), 4) for ep in (1, 2, 8)}
    peaks = [found[ep].footprint.allocated_bytes for ep in (1, 2, 8)]
    assert peaks[0] > peaks[1] > peaks[2]
    assert found[8].flops_per_sample == pytest.approx(found[1].flops_per_sample, rel=1e-6)
    with pytest.raises(UsageError, match=r"ep=16: it does not divide the 8 experts"):
        evaluator.predict(replace(BASE, mesh=Mesh(1, 16, 2, 1, 16)), 4)
