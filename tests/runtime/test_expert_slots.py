"""Experts moved between real ranks: later losses, gradients and states are as without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.experts.assignment import Assignment, LayerAssignment, assign_experts
from autopar.plan_document import Plan
from autopar.program import Program
from autopar.runtime import collectives  # noqa: F401 - registers the ops
from autopar.workflow.verification import build_real
from tests.runtime.expert_plans import ROWS, batch, run_split

LAYERS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def assignment(ranks: int, **layers: list[int]) -> Assignment:
    """`l0`, `l1`: the rank of each expert of a layer."""
    return Assignment(
        ranks,
        {
            LAYERS[int(name[1:])]: LayerAssignment(tuple((r,) for r in held), 0, 0, 0, 0, 0)
            for name, held in layers.items()
        },
    )


def build(text: str, plan: Plan, program: Program) -> Any:
    from autopar.api import build

    model, _ = build_real(text, None, 0)
    return build(model, plan, ROWS, lambda: program, timeout_seconds=100.0)


def adamw(program: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(program.parameters(), lr=1e-2, weight_decay=0.1)


def train(program: Any, optimizer: Any, seed: int) -> tuple[float, dict[str, torch.Tensor]]:
    program.zero_grad()
    loss = float(program.step(batch(seed)))
    gradients = program.full_gradients()
    optimizer.step()
    return loss, gradients


def whole_state(program: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    found = program.optimizer_state_dict(optimizer)
    tensors = {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in tensors.items()}


def moved(text: str, plans: list[Plan], program: Program) -> list[dict[str, Any]]:
    import torch.distributed as dist

    from autopar.api import prepared  # noqa: F401 - warm

    results = []
    for plan in plans:
        found: dict[str, Any] = {}
        ranks = plan.mesh.tp
        for name in ("still", "moved"):
            distributed = build(text, plan, program)
            optimizer = adamw(distributed)
            steps = [train(distributed, optimizer, 1)]
            if name == "moved":
                by_load = assign_experts(distributed.expert_load(), ranks)
                distributed.rebalance(by_load, optimizer)
                found["after the first move"] = distributed.full_state_dict()
            elif dist.get_rank() == 0 or True:
                found["before the first move"] = distributed.full_state_dict()
            steps.append(train(distributed, optimizer, 2))
            if name == "moved":
                order = [1, 0, 0, 1] if ranks == 2 else [3, 2, 0, 1]
                distributed.rebalance(assignment(ranks, l0=order), optimizer)
                found["rows of ranks"] = distributed.routing().layers[LAYERS[0]].of_ranks
                found["order"] = order
            steps.append(train(distributed, optimizer, 3))
            found[name] = steps, distributed.full_state_dict(), whole_state(distributed, optimizer)
            found[f"load {name}"] = distributed.expert_load()
        results.append(found)
    return results


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5, msg=name)


def check_moved(nproc: int, pins: list[str], factor: str, in_part: bool = False) -> None:
    by_rank = run_split(moved, "mixtral", nproc, pins, factor, in_part)
    for found in by_rank[0]:
        for name, value in found["before the first move"].items():
            assert torch.equal(found["after the first move"][name], value), name
        (still, weights, state), (again, other_weights, other_state) = (
            found["still"],
            found["moved"],
        )
        for (loss, gradients), (other_loss, other_gradients) in zip(still, again, strict=True):
            assert other_loss == pytest.approx(loss, rel=1e-5)
            same(other_gradients, gradients)
        same(other_weights, weights)
        same(other_state, state)
        assert found["load moved"] == found["load still"]
        assert len(found["rows of ranks"]) == max(found["order"]) + 1


@pytest.mark.parametrize("factor", ["e", "t,e"])
def test_two_ranks(factor: str) -> None:
    check_moved(
        2, ["pp=1,dp=1,tp=2,weights=split", "pp=1,dp=1,tp=2,weights=split,recompute=full"], factor
    )


def test_four_ranks_with_sharded_states() -> None:
    pins = [
        "pp=1,dp=2,tp=2,weights=split,zero=3,microbatches=2",
        "pp=1,dp=2,tp=2,weights=split,zero=1",
        "pp=2,dp=1,tp=2,weights=split,microbatches=2",
        "pp=1,dp=1,tp=4,weights=split",
    ]
    check_moved(4, pins, "t,e")


@pytest.mark.slow
def test_blocks_that_are_recomputed_in_part() -> None:
    check_moved(2, ["pp=1,dp=1,tp=2,weights=split"], "e", in_part=True)
