"""What a rank runs in `test_dropout`: GPT-2 with dropout everywhere, several times a plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.api import build
from autopar.plan_document import Plan
from autopar.program import Program
from tests.end_to_end.models import MODELS, RATE, gpt2
from tests.end_to_end.plans import Planner
from tests.end_to_end.training import batch
from tests.warm_ranks import run_on_forks

LAYOUTS = ("dp=2,tp=2,zero=3,weights=split", "pp=2,tp=2,weights=split")
DRAWS = 24
Gradients = dict[str, torch.Tensor]


def ranks_of_a_planner() -> list[dict[str, Any]]:
    """In a planner: capture and search once, then fork four ranks."""
    planner = Planner.of(f"{MODELS}:gpt2_dropout")
    plans = [planner.plan(4, f"{pins},recompute=none") for pins in LAYOUTS]
    for plan in plans:
        placements = plan.placements["transformer.h.0"]
        assert placements["dropout"].startswith(("shard", "replicate"))
        assert placements["scaled_dot_product_attention"] == "shard g"
    in_part = [planner.in_part(plan, -1) for plan in plans]
    return run_on_forks(on_rank, 4, (plans, in_part, planner.program), timeout_seconds=200)


def with_recompute(plan: Plan) -> Plan:
    stages = tuple(replace(s, recompute=tuple(s.blocks)) for s in plan.stages)
    return replace(plan, stages=stages)


def compiled(plan: Plan, captured: Program, seed: int) -> Any:
    """As `autopar.compile` does, but for the capture, which is the same for all."""
    torch.manual_seed(0)
    model, _ = gpt2(RATE)
    torch.manual_seed(seed)
    return build(model, plan, 8, lambda: captured, timeout_seconds=60)


def two_steps(plan: Plan, captured: Program, seed: int) -> tuple[list[float], Gradients]:
    program = compiled(plan, captured, seed)
    losses = [float(program.step(batch())) for _ in range(2)]
    return losses, program.full_gradients()


def whole_gradients(program: Any) -> dict[str, torch.Tensor]:
    """This rank's gradients of parameters that every tp rank holds whole."""
    found = {}
    for name, parameter in program.named_parameters():
        axes = parameter.device_mesh.mesh_dim_names
        if parameter.placements[axes.index("tp")].is_replicate():
            found[name] = parameter.grad.to_local().clone()
    return found


def on_rank(plans: list[Plan], in_part: list[Plan], captured: Program) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for plan, partly in zip(plans, in_part, strict=True):
        key = str(plan.mesh)
        found[f"{key} first"] = two_steps(plan, captured, 1)
        found[f"{key} again"] = two_steps(plan, captured, 1)
        found[f"{key} other seed"] = two_steps(plan, captured, 2)
        found[f"{key} recomputed"] = two_steps(with_recompute(plan), captured, 1)
        found[f"{key} recomputed in part"] = two_steps(partly, captured, 1)
        program = compiled(plan, captured, 5)
        found[f"{key} losses"] = [float(program.step(batch())) for _ in range(DRAWS)]
        if plan.mesh.dp == 1:
            found["place"] = program.ranks.mesh.coordinates(program.ranks.rank)
            found["whole"] = whole_gradients(program)
    return found


def one_device_losses(rate: float, draws: int) -> list[float]:
    torch.manual_seed(0)
    model, _ = gpt2(rate)
    torch.manual_seed(9)
    with torch.no_grad():
        return [float(model(**batch()).loss) for _ in range(draws)]
