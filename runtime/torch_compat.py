"""The names of torch that are not public, each behind one function, in one place.

`tests/runtime/test_torch_compat.py` fails when a torch release moves one of them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, _backward
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

# What `runtime/pipeline.py` overrides or calls; the test checks that they exist.
STAGE_HOOKS = ("backward_maybe_with_nosync", "perform_reduce_grad", "forward_one_chunk")
FSDP_METHODS = (
    "set_is_last_backward",
    "set_reshard_after_backward",
    "set_requires_gradient_sync",
    "set_gradient_divide_factor",
)


def resolve_group(name: str) -> dist.ProcessGroup:
    """The process group of that c10d name; raises `RuntimeError` when there is none."""
    group: dist.ProcessGroup = distributed_c10d._resolve_process_group(name)
    return group


class ShortSchedule1F1B(Schedule1F1B):
    """1F1B that also accepts fewer microbatches than stages.

    torch's constructor refuses that, but its step handles it: warm-up is the lesser of microbatches
    and remaining stages, and every send meets its receive.
    """

    def __init__(self, stage: PipelineStage, n_microbatches: int, **options: object) -> None:
        PipelineScheduleSingle.__init__(self, stage, n_microbatches, **options)

    def _get_pipeline_order(self) -> None:
        """The printable order; torch's assumes enough microbatches."""
        return None


def stage_backward(
    stage_output: object, output_grads: object, input_values: object
) -> tuple[torch.Tensor | None, ...]:
    """Backward of one microbatch of a stage: accumulates into parameters, returns input gradients."""
    result: tuple[torch.Tensor | None, ...] = _backward.stage_backward(
        stage_output, output_grads, input_values
    )
    return result
