"""Run a stage over all microbatches of a step: alone, or as one of several pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from autopar.plan_document import Plan
from autopar.runtime.loss_weights import weighted
from autopar.runtime.ranks import Ranks
from autopar.runtime.stage import BATCH_PREFIX
from autopar.runtime.torch_compat import (
    ShortSchedule1F1B,
    allocate_buffers,
    free_buffers,
    stage_backward,
)
from autopar.runtime.zero import DataParallel
from autopar.stage_program import ValueSpec

Tensor = torch.Tensor
Batch = dict[str, Tensor]


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
            loss = weighted(self._engine.stage(**arguments), weights[index])
            if backward:
                self._engine.before_backward(last=index == self._count - 1)
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total


class PipelinedStage:
    """One stage of `plan.mesh.pp`, under torch's GPipe or 1F1B schedule."""

    def __init__(self, engine: DataParallel, plan: Plan, ranks: Ranks) -> None:
        program = engine.stage.program
        self._device = ranks.device
        self._is_last = program.index == program.stages - 1
        stage = _Stage(
            engine,
            program.index,
            program.stages,
            ranks.device,
            # Shapes are known: no exchange of metadata at the first step.
            input_args=tuple(_example(spec) for spec in program.receive),
            output_args=tuple(_example(spec) for spec in program.send)
            if program.send
            else (torch.empty((), device="meta"),),
            group=ranks.group("pp"),
        )
        self.stage = stage
        schedule = ScheduleGPipe if plan.schedule == "gpipe" else ShortSchedule1F1B
        self._schedule: Any = schedule(
            stage, plan.microbatches, loss_fn=weighted, scale_grads=False
        )

    def run(self, batch: Batch, weights: Tensor, backward: bool) -> Tensor:
        """Sum of the weighted losses on the last stage, 0 on the others."""
        losses: list[Tensor] = []
        run = self._schedule.step if backward else self._schedule.eval
        # The schedule cuts keyword arguments and the loss function's target along dim 0.
        # A prefix keeps the user's names apart from the schedule's own parameters.
        named = {BATCH_PREFIX + name: value for name, value in batch.items()}
        run(target=weights if self._is_last else None, losses=losses, return_outputs=False, **named)
        if not losses:
            return torch.zeros((), dtype=torch.float32, device=self._device)
        return torch.stack([loss.detach() for loss in losses]).sum().float()


class _Stage(PipelineStage):
    """torch's stage with two changes.

    The engine decides when gradients are reduced, where torch always waits for the last microbatch.
    Memory for received values exists from their receipt to their backward, where torch holds it
    for all microbatches from the first step on, and on the last stage to the end of the step.
    """

    def __init__(
        self, engine: DataParallel, index: int, stages: int, device: torch.device, **options: Any
    ) -> None:
        super().__init__(engine.stage, index, stages, device, **options)
        self._engine = engine

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], None]:
        assert backward_type == "full", backward_type
        self._engine.before_backward(last_backward)
        return stage_backward(**bwd_kwargs), None

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the last backward reduced already."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[Any]:
        allocate_buffers(self.args_recv_info[fwd_chunk_id], self.device)
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[Any]:
        allocate_buffers(self.grad_recv_info.get(bwd_chunk_id, ()), self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        if not self.has_backward:
            free_buffers(self.args_recv_info[fwd_chunk_id])
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if self.has_backward:
            free_buffers(self.args_recv_info[bwd_chunk_id])
            free_buffers(self.grad_recv_info.get(bwd_chunk_id, ()))
        if self.has_backward and self.is_last:
            self._forget_graph(bwd_chunk_id, kwargs.get("loss"))

    def _forget_graph(self, chunk: int, loss: Tensor | None) -> None:
        """Let go of the stage's input: the graph of a loss holds it to the end of the step."""
        if loss is not None:
            loss.detach_()
        if chunk < len(self.output_chunks):
            self.output_chunks[chunk] = self.output_chunks[chunk].detach()

    def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
        with self._on_meta():
            prepared = super()._prepare_forward_infra(*args, **kwargs)
        for infos in self.args_recv_info.values():
            free_buffers(infos)
        return prepared

    def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
        with self._on_meta():
            infos = super()._create_grad_recv_info(act_send_info)
        free_buffers(infos)
        return infos

    def clear_runtime_states(self) -> None:
        """Without the buffers, whose gradients torch clears: here they are new in every step."""
        infos, self.args_recv_info = self.args_recv_info, {}
        super().clear_runtime_states()
        self.args_recv_info = infos

    def _validate_fwd_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        """Before torch 2.13 also the loss, which is sent nowhere, is held against its example."""
        check = getattr(super(), "_validate_fwd_outputs", None)
        if check is not None and not self.is_last:
            check(outputs)

    @contextmanager
    def _on_meta(self) -> Iterator[None]:
        """Where torch would allocate, make it allocate nothing."""
        self.device, device = torch.device("meta"), self.device
        try:
            yield
        finally:
            self.device = device


def _example(spec: ValueSpec) -> Tensor:
    return torch.empty(
        spec.shape, dtype=spec.dtype, device="meta", requires_grad=spec.requires_grad
    )
