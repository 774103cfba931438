"""Rows above the capacity of experts, on real ranks: dropped by each rank for its own tokens,
whoever holds the experts."""

from __future__ import annotations

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
