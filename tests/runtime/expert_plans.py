"""Plans of toy models in which experts are split in one way, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.end_to_end.expert_models import MODELS
from tests.end_to_end.models import SEQUENCE, VOCABULARY
from tests.end_to_end.plans import Planner, split_experts_only
from tests.warm_ranks import run_on_forks, run_planner

ROWS = 8


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (ROWS, SEQUENCE), generator=generator)
    return {"input_ids": ids, "labels": ids}


def run_split(
    function: Callable[..., Any],
    model: str,
    nproc: int,
    pins: list[str],
    factor: str,
    in_part: bool = False,
) -> list[Any]:
    """`function(text, plans, program)` on ranks; results by rank. `in_part`: blocks are recomputed
    in part."""
    return run_planner(_plan_and_run, function, f"{MODELS}:{model}", nproc, pins, factor, in_part)


def _plan_and_run(
    function: Callable[..., Any],
    text: str,
    nproc: int,
    pins: list[str],
    factor: str,
    in_part: bool,
) -> list[Any]:
    split_experts_only(factor)
    planner = Planner.of(text)
    plans = [planner.plan(nproc, p) for p in pins]
    if in_part:
        plans = [planner.in_part(plan, -1) for plan in plans]
    for plan in plans if plans[0].mesh.tp > 1 else ():
        chosen = {s for b in plan.placements.values() for op, s in b.items() if op == "experts"}
        assert chosen == {f"shard {factor}"}, chosen
    return run_on_forks(function, nproc, (text, plans, planner.program), timeout_seconds=200)
