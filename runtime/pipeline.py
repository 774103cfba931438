"""Run a stage over all microbatches of a step: alone, or as one of several pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.pipelining import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from autopar.plan_document import Plan
from autopar.runtime.interleaved import LoopedStage
from autopar.runtime.loss_weights import weighted
from autopar.runtime.pipeline_stage import PlannedStage
from autopar.runtime.ranks import Ranks
from autopar.runtime.stage import BATCH_PREFIX
from autopar.runtime.torch_compat import ShortSchedule1F1B
from autopar.runtime.zero import DataParallel
from autopar.runtime.zero_bubble import DividedStage
from autopar.stage_program import ValueSpec

Tensor = torch.Tensor
Batch = dict[str, Tensor]
# Schedules in which the stages of a rank take turns: torch's, and what they need of a stage.
IN_TURNS: dict[str, tuple[Any, type[LoopedStage]]] = {
    "interleaved": (ScheduleInterleaved1F1B, LoopedStage),
    "zero-bubble": (ScheduleInterleavedZeroBubble, DividedStage),
    "zbv": (ScheduleZBVZeroBubble, DividedStage),
}


class SingleStage:
    """No pipeline: forward and backward of one microbatch after the other."""

    def __init__(self, engine: DataParallel, microbatches: int) -> None:
        self._engine = engine
        self._count = microbatches

    def run(self, batch: Batch, weights: Tensor, backward: bool) -> Tensor:
        """Sum of the weighted losses; `batch` holds all microbatches along dim 0."""
        pieces = {name: value.chunk(self._count) for name, value in batch.items()}
        total = torch.zeros((), dtype=torch.float32, device=weights.device)
        for index in range(self._count):
            arguments = {name: chunks[index] for name, chunks in pieces.items()}
            # What the last reduction read would be held to the next backward.
            self._engine.release()
            loss = weighted(self._engine.stage(**arguments), weights[index])
            if backward:
                self._engine.before_backward(last=index == self._count - 1)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total


class PipelinedStages:
    """This rank's stages of a pipeline, under torch's GPipe, 1F1B, interleaved 1F1B,
    zero-bubble or ZBV schedule."""

    def __init__(self, engines: Sequence[DataParallel], plan: Plan, ranks: Ranks) -> None:
        self._device = ranks.device
        last = engines[-1].stage.program
        self._has_loss = last.index == last.stages - 1
        schedule, kind = IN_TURNS.get(plan.schedule, (None, None))
        self.stages = [_stage(engine, engines, kind, ranks) for engine in engines]
        options: dict[str, Any] = {"loss_fn": weighted, "scale_grads": False}
        self._schedule: Any
        if schedule is not None:
            self._schedule = schedule([*self.stages], plan.microbatches, **options)
        else:
            schedule = ScheduleGPipe if plan.schedule == "gpipe" else ShortSchedule1F1B
            self._schedule = schedule(self.stages[0], plan.microbatches, **options)

    def run(self, batch: Batch, weights: Tensor, backward: bool) -> Tensor:
        """Sum of the weighted losses on the rank of the last stage, 0 on the others."""
        losses: list[Tensor] = []
        run = self._schedule.step if backward else self._schedule.eval
        # The schedule cuts keyword arguments and the loss function's target along dim 0.
        # A prefix keeps the user's names apart from the schedule's own parameters.
        named = {BATCH_PREFIX + name: value for name, value in batch.items()}
        run(
            target=weights if self._has_loss else None, losses=losses, return_outputs=False, **named
        )
        for stage in self.stages:
            stage.finish_sends()
        if not losses:
            return torch.zeros((), dtype=torch.float32, device=self._device)
        return torch.stack([loss.detach() for loss in losses]).sum().float()


def _stage(
    engine: DataParallel,
    engines: Sequence[DataParallel],
    looped: type[LoopedStage] | None,
    ranks: Ranks,
) -> PlannedStage:
    """torch's stage of an engine; `looped`: its kind, if the `engines` of the rank take turns."""
    program = engine.stage.program
    place = (program.index, program.stages, ranks.device)
    options: dict[str, Any] = {
        # Shapes are known: no exchange of metadata at the first step.
        "input_args": tuple(_example(spec) for spec in program.receive),
        "output_args": tuple(_example(spec) for spec in program.send)
        if program.send
        else (torch.empty((), device="meta"),),
        "group": ranks.group("pp"),
    }
    if looped is not None:
        others = [other for other in engines if other is not engine]
        return looped(engine, others, *place, **options)
    return PlannedStage(engine, *place, **options)


def _example(spec: ValueSpec) -> Tensor:
    return torch.empty(
        spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad
    )
