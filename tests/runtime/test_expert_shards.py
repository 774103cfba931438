"""Which dim of a parameter of experts FSDP2 shards, and over which ranks, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.plan_document import Plan
from autopar.program import Program
from tests.runtime.expert_plans import batch, run_split
from tests.runtime.test_expert_slots import build

EXPERTS = "model.layers.0.mlp.experts.down_proj"
ROUTER = "model.layers.0.mlp.gate.weight"


def shards(text: str, plans: list[Plan], program: Program) -> list[dict[str, Any]]:
    found = []
    for plan in plans:
        made = build(text, plan, program)
        made.step(batch(1))
        seen: dict[str, Any] = {"ranks": (made.ranks.index("ep"), made.ranks.index("dp"))}
        for name, parameter in made.named_parameters():
            if name in (EXPERTS, ROUTER):
                mesh = parameter.device_mesh
                dims = [getattr(p, "dim", None) for p in parameter.placements]
                own = tuple(parameter.to_local().shape)
                seen[name] = mesh.mesh_dim_names, dims, tuple(parameter.shape), own
                assert parameter.grad is not None
                assert parameter.grad.to_local().shape == parameter.to_local().shape
        found.append(seen)
    return found


PLANS = {
    # 4 experts in 2 groups: each rank one of them.
    "pp=1,dp=4,tp=1,ep=2,zero=3": (["expert_replica", "ep", "tp"], [0, 0, None], (1, 32, 32)),
    # 1 expert a rank and nobody else holds it.
    "pp=1,dp=4,tp=1,ep=4,zero=1": (["expert_replica", "ep", "tp"], [0, 0, None], (1, 32, 32)),
    "pp=1,dp=4,tp=1,ep=2,zero=0": (["ep", "tp"], [0, None], (2, 32, 32)),
}


def test_experts_and_the_rest_are_spread_over_ranks_of_their_own() -> None:
    by_rank = run_split(shards, "mixtral", 4, list(PLANS), "i")
    for at, (names, dims, local) in enumerate(PLANS.values()):
        for rank, plans in enumerate(by_rank):
            found = plans[at]
            assert found[EXPERTS] == (tuple(names), dims, (4, 32, 32), local)
            axes, _, whole, own = found[ROUTER]
            assert "ep" not in axes and whole == (4, 32)
            assert own == ((4, 32) if "zero=0" in list(PLANS)[at] else (1, 32))
            ep = int(list(PLANS)[at].split("ep=")[1][0])
            assert found["ranks"] == (rank % ep, rank)


@pytest.mark.slow
def test_matrices_are_sharded_where_experts_are_too_few() -> None:
    """Of 8 ranks 2 hold the same expert, or 4 the same two."""
    pins = ["pp=1,dp=8,tp=1,ep=4,zero=3", "pp=1,dp=8,tp=1,ep=2,zero=3"]
    for plans in run_split(shards, "mixtral", 8, pins, "i"):
        # One expert for two ranks: half of its rows each.
        assert plans[0][EXPERTS][1:] == ([1, 0, None], (4, 32, 32), (1, 16, 32))
        assert plans[1][EXPERTS][1:] == ([1, 0, None], (4, 32, 32), (2, 8, 32))
