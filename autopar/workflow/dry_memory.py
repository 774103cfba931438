"""The memory of one rank, measured on the program that would run: without the other ranks, and
without the memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.api import rewrite_for
from autopar.cost.optimizer import LEAST_QUANTIZED
from autopar.passes.rewrite.place_on_device import place_on_device
from autopar.plan_document import Plan
from autopar.program import Program
from autopar.runtime.dry_run import dry_run, empty_batch
from autopar.runtime.live_bytes import LiveBytes, Peak
from autopar.runtime.planned_optimizer import eight_bit_adamw, planned_optimizer
from autopar.runtime.program import DistributedProgram
from autopar.runtime.ranks import Ranks

# Those that torch runs over all parameters at once on an accelerator.
AT_ONCE = ("adamw", "sgd", "sgd-momentum")


def dry_memory(model: nn.Module, program: Program, plan: Plan, stage: int) -> Peak:
    """The fullest moment of a training step on the first rank of pipeline rank `stage` of `plan`.

    `model`: on the meta device; `program`: captured from it and prepared for the plan's precision.
    Every op runs on the CPU's kernels' shapes, the optimizer as on an accelerator (foreach). No
    process group may exist. Takes about a second for a layer and micro-batch.
    """
    with dry_run(plan.mesh.rank(pp=stage), plan.mesh.size) as shapes_only:
        ranks = Ranks.create(plan.mesh)
        parts = rewrite_for(program, plan).stages
        groups = ranks.group_names()
        for index in plan.stage_indexes(stage):
            place_on_device(parts[index], ranks.device, groups)
        _make_tables(plan.optimizer)
        with shapes_only, torch.compiler.set_stance("force_eager"):
            distributed = DistributedProgram(parts, plan, ranks, model)
            return measured_step(distributed)


def _make_tables(optimizer: str) -> None:
    """torchao computes once what its 8-bit codes stand for: with numbers, so before there are
    none."""
    if optimizer == "adamw-8bit":
        parameter = nn.Parameter(torch.zeros(LEAST_QUANTIZED))
        parameter.grad = torch.zeros_like(parameter)
        with torch.compiler.set_stance("force_eager"):
            eight_bit_adamw()([parameter]).step()


def measured_step(distributed: DistributedProgram) -> Peak:
    """The fullest moment of a whole step, after one that leaves states and buffers in place."""
    batch = empty_batch(distributed)
    name = distributed.plan.optimizer
    options: dict[str, Any] = {"foreach": True} if name in AT_ONCE else {}
    if name == "adamw-host":
        options["host"] = "meta"  # what is there is not the device's
    optimizer = planned_optimizer(distributed, **options)
    live = LiveBytes(distributed, optimizer)
    with live:
        for _ in range(2):
            live.start()
            distributed.step(batch)
            optimizer.step()
            optimizer.zero_grad()
    live.close()
    return live.peak()
