"""The heaviest ops add up to what the blocks of a rank are priced."""

from __future__ import annotations

import pytest
import torch

from autopar.api import search_program
from autopar.cluster import Cluster
from autopar.passes.capture import capture
from autopar.workflow import heaviest_ops as module
from autopar.workflow.heaviest_ops import heaviest_ops
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.prepare import prepare
from tests.workflow.test_activation_formula import LENGTH, Gpt


@pytest.mark.parametrize(
    "pins", ["pp=1,dp=1,tp=2", "pp=2,dp=1,tp=1,microbatch=1", "pp=1,dp=2,tp=1"]
)
def test_all_ops_are_the_compute_and_communication_of_a_rank(
    pins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.empty(2, LENGTH // 16, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = Gpt(4)
    program = capture(model, {"ids": ids, "labels": ids}, name="gpt", dtype=torch.float32)
    cluster = Cluster.parse("h100:1x2")
    outcome = search_program(program, cluster, global_batch_size=4, pins=pins, explain=True)
    assert outcome.plan is not None and outcome.result.choice is not None
    choice = outcome.result.choice
    told = outcome.plan.predicted["heaviest_ops"]
    assert 1 <= len(told) <= 5
    assert [op["seconds"] for op in told] == sorted((o["seconds"] for o in told), reverse=True)
    prepared = prepare(program, program.sizes)
    costs = ModelCosts(prepared, cluster, dict(prepared.sizes))
    monkeypatch.setattr(module, "MOST", 10**6)
    every, classes = heaviest_ops(costs, choice)
    assert [op.to_dict() for op in every[:5]] == told
    ranks = []
    for rank in range(choice.mesh.pp):
        stages = outcome.plan.stage_indexes(rank)
        names = {name for i in stages for name in choice.stages[i].blocks}
        held = [b for b in choice.chain.blocks if b.name in names]
        ranks.append({kind: [b for b in held if b.kind == kind] for kind in {b.kind for b in held}})
    for kind in {b.kind for b in choice.chain.blocks}:
        most = max((r.get(kind, []) for r in ranks), key=len)
        priced = sum(b.seconds for b in most) * choice.microbatches
        assert sum(op.seconds for op in every if op.block == kind) == pytest.approx(priced)
        assert {op.count for op in every if op.block == kind} <= {len(most)}
    assert {op.bound for op in every} <= {"compute", "memory", "launch", "communication"}
    assert classes == pytest.approx(outcome.plan.predicted["class_seconds"])
    busiest = max(sum(b.seconds for some in rank.values() for b in some) for rank in ranks)
    assert sum(classes.values()) == pytest.approx(busiest * choice.microbatches)
