"""The names of torch that are not public or not stable, each behind one name, in one place.

`tests/runtime/test_torch_compat.py` fails when a torch release moves one of them.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, _backward
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

# Methods of `PipelineStage` that `autopar.runtime.pipeline` overrides: without the first two
# gradients would be reduced at other times than planned, without the rest memory is held longer.
STAGE_HOOKS = (
    "backward_maybe_with_nosync",
    "perform_reduce_grad",
    "get_fwd_recv_ops",
    "get_bwd_recv_ops",
    "forward_one_chunk",
    "backward_one_chunk",
    "_prepare_forward_infra",
    "_create_grad_recv_info",
    "clear_runtime_states",
)

_c10d: Any = distributed_c10d

# torch 2.13 renamed these two and warns about the old names.
all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of that c10d name; raises `RuntimeError` when there is none."""
    group: dist.ProcessGroup = _c10d._resolve_process_group(name)
    return group


def set_timeout(group: dist.ProcessGroup, wait: datetime.timedelta) -> None:
    """How long an operation of the group may take; a mesh gives its groups half an hour."""
    _c10d._set_pg_timeout(wait, group)


def quiet_redistribution() -> None:
    """No warning for gathering a tensor that is split over two mesh axes: it is rare and meant."""
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def stage_backward(
    stage_output: object, output_grads: object, input_values: object
) -> tuple[torch.Tensor | None, ...]:
    """Backward of one microbatch: accumulates into parameters, returns gradients of the inputs."""
    result: tuple[torch.Tensor | None, ...] = _backward.stage_backward(
        stage_output, output_grads, input_values
    )
    return result


def allocate_buffers(infos: Iterable[Any], device: torch.device) -> None:
    """Memory for values about to be received, where there is none."""
    for info in infos:
        kind = getattr(info, "autopar_kind", None)
        if kind is not None and info.buffer is None:
            made = torch.empty_strided(kind.shape, kind.stride(), dtype=kind.dtype, device=device)
            info.buffer = made.requires_grad_(kind.requires_grad)


def free_buffers(infos: Iterable[Any]) -> None:
    """Forget the memory of received values; what kind they are is kept beside them, on meta."""
    for info in infos:
        buffer = getattr(info, "buffer", None)
        if buffer is None:
            continue
        if not hasattr(info, "autopar_kind"):
            # Before torch 2.13 the description does not tell: the buffer is all there is.
            kind = torch.empty_strided(
                buffer.shape, buffer.stride(), dtype=buffer.dtype, device="meta"
            )
            info.autopar_kind = kind.requires_grad_(buffer.requires_grad)
        info.buffer = None


class ShortSchedule1F1B(Schedule1F1B):
    """1F1B that also accepts fewer microbatches than stages.

    torch's constructor refuses that, but its step handles it: warm-up is the lesser of microbatches
    and remaining stages, and every send meets its receive.
    """

    def __init__(self, stage: PipelineStage, n_microbatches: int, **options: Any) -> None:
        PipelineScheduleSingle.__init__(self, stage, n_microbatches, **options)

    def _get_pipeline_order(self) -> None:
        """The printable order; torch's assumes enough microbatches."""
        return None
