"""The memory of one rank, measured on the program that would run: without the other ranks, and
without the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autopar.api import rewrite_for
from autopar.passes.rewrite.place_on_device import place_on_device
from autopar.plan_document import Plan
from autopar.program import Program
from autopar.runtime.dry_run import dry_run, empty_batch
from autopar.runtime.live_bytes import LiveBytes, Peak
from autopar.runtime.program import DistributedProgram
from autopar.runtime.ranks import Ranks

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, foreach=True),
    "sgd-momentum": lambda parameters: torch.optim.SGD(parameters, momentum=0.9, foreach=True),
}


def dry_memory(model: nn.Module, program: Program, plan: Plan, stage: int) -> Peak:
    """The fullest moment of a training step on the first rank of pipeline rank `stage` of `plan`.

    `model`: on the meta device; `program`: captured from it and prepared for the plan's precision.
    Every op runs on the CPU's kernels' shapes, the optimizer as on an accelerator (foreach). No
    process group may exist. Takes about a second for a layer and micro-batch.
    """
    with dry_run(stage * plan.mesh.stride("pp"), plan.mesh.size) as shapes_only:
        ranks = Ranks.create(plan.mesh)
        parts = rewrite_for(program, plan).stages
        groups = {axis: ranks.group(axis).group_name for axis in ("dp", "cp", "tp")}
        for index in plan.stage_indexes(stage):
            place_on_device(parts[index], ranks.device, groups)
        with shapes_only:
            distributed = DistributedProgram(parts, plan, ranks, model)
            return measured_step(distributed)


def measured_step(distributed: DistributedProgram) -> Peak:
    """The fullest moment of a whole step, after one that leaves states and buffers in place."""
    batch = empty_batch(distributed)
    optimizer = OPTIMIZERS[distributed.plan.optimizer](list(distributed.parameters()))
    live = LiveBytes(distributed, optimizer)
    with live:
        for _ in range(2):
            live.start()
            distributed.step(batch)
            optimizer.step()
            optimizer.zero_grad()
    live.close()
    return live.peak()
