"""Rows above the capacity of experts, on real ranks: dropped by each rank for its own tokens,
whoever holds the experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.plan_document import Plan
from autopar.program import Program
from tests.runtime.expert_plans import ROWS, batch, run_split
from tests.runtime.test_expert_slots import LAYERS, assignment, build, same

MODEL = "mixtral_dropping"


def run(text: str, plans: list[Plan], program: Program) -> list[dict[str, Any]]:
    found = []
    for plan in plans:
        made = build(text, plan, program)
        loss = float(made.step(batch(1)))
        layers = made.routing().layers
        told = str(made.routing())
        kept = {n: (list(x.rows), x.dropped) for n, x in layers.items()}
        gradients = made.full_gradients()
        if plan.mesh.ep == 2:
            made.rebalance(assignment(2, l0=[1, 0, 0, 1]))
        made.zero_grad()
        again = float(made.step(batch(1)))
        found.append(
            {"loss": loss, "gradients": gradients, "rows": kept, "told": told, "again": again}
        )
    return found


def with_copies(text: str, plans: list[Plan], program: Program) -> list[tuple[float, Any, Any]]:
    """Loss, gradients, and rows that were kept and dropped, with experts in slots."""
    results = []
    for plan in plans:
        made = build(text, replace(plan, spare_experts=2), program)
        ranks = made._slots.layers[0].ranks
        holders = [(0, 1), 1, 0, (1, 0)] if ranks == 2 else [(0, 2), (3, 1), 2, 3]
        made.rebalance(assignment(ranks, l0=holders, l1=holders))
        loss = float(made.step(batch(1)))
        kept = {n: (list(x.rows), x.dropped) for n, x in made.routing().layers.items()}
        results.append((loss, made.full_gradients(), kept))
    return results


def test_copies_drop_what_their_expert_drops() -> None:
    """The limit is for an expert: rows are dropped before copies share the others."""
    alone = run_split(run, MODEL, 1, ["pp=1,dp=1,tp=1,microbatches=4"], "i")[0][0]
    over_replicas = ["pp=1,dp=4,tp=1,ep=4,zero=0", "pp=1,dp=2,tp=2,ep=2,microbatches=2"]
    for pins, factor in ((over_replicas, "i"), (["pp=1,dp=2,tp=2,microbatches=2"], "e")):
        pins = [f"{p},weights=split" for p in pins]
        for loss, gradients, kept in run_split(with_copies, MODEL, 4, pins, factor)[0]:
            assert loss == pytest.approx(alone["loss"], rel=1e-5)
            assert kept == alone["rows"]
            same(gradients, alone["gradients"])


def test_each_replica_drops_of_its_own_tokens() -> None:
    """As many tokens at once, so the same are dropped: micro-batches of one rank, or ranks; with
    experts whole, split by replicas, and moved between these."""
    alone = run_split(run, MODEL, 1, ["pp=1,dp=1,tp=1,microbatches=4"], "i")[0][0]
    pins = [
        "pp=1,dp=4,tp=1,ep=1,zero=1",
        "pp=1,dp=4,tp=1,ep=4,zero=3",
        "pp=1,dp=2,tp=2,ep=2,microbatches=2,weights=split",
        "pp=1,dp=1,tp=4,ep=1,microbatches=4,weights=split",
        "pp=2,dp=2,tp=1,ep=2,microbatches=2",
    ]
    assert sum(dropped for _, dropped in alone["rows"].values()) > 0
    for rows, dropped in alone["rows"].values():
        # 2 sequences of 16 at once, two choices each, 0.75 of the mean: 12 rows at most.
        assert max(rows) <= 4 * 12 and sum(rows) + dropped == ROWS * 16 * 2
    for found in run_split(run, MODEL, 4, pins, "i")[0]:
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert found["again"] == pytest.approx(alone["loss"], rel=1e-5)
        assert found["rows"] == alone["rows"]
        same(found["gradients"], alone["gradients"])
        assert "of the rows dropped" in found["told"] and "larger capacity factor" in found["told"]
    assert set(alone["rows"]) == set(LAYERS)
    assert all(isinstance(g, torch.Tensor) for g in alone["gradients"].values())
