"""A stage of a pipeline: torch's, with memory and the reduction of gradients as planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from autopar.runtime.torch_compat import allocate_buffers, free_buffers, stage_backward
from autopar.runtime.zero import DataParallel

Tensor = torch.Tensor


class PlannedStage(PipelineStage):
    """torch's stage with two changes.

    The engine decides when gradients are reduced, where torch always waits for the last microbatch.
    Memory for received values exists from their receipt to their backward, where torch holds it
    for all microbatches from the first step on, and on the last stage to the end of the step.
    """

    def __init__(
        self,
        engine: DataParallel,
        index: int,
        stages: int,
        device: torch.device,
        *,
        module: nn.Module | None = None,
        **options: Any,
    ) -> None:
        super().__init__(module or engine.stage, index, stages, device, **options)
        self._engine = engine

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        # What the last reduction read would be held to the next backward, behind this forward.
        self._engine.release()
        return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], None]:
        assert backward_type == "full", backward_type
        self._engine.before_backward(last_backward)
        return stage_backward(**bwd_kwargs), None

    def finish_sends(self) -> None:
        """Nothing: a schedule of one stage waits for what it sent."""

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
