"""The private names of torch that the runtime relies on are there."""

from __future__ import annotations

import inspect

from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import Schedule1F1B, _backward
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from autopar.runtime import torch_compat
from autopar.runtime.pipeline import _Stage


def test_stage_hooks() -> None:
    bases = [base for base in _Stage.__mro__ if base is not _Stage]
    for name in torch_compat.STAGE_HOOKS:
        assert name in vars(_Stage), name
        assert any(name in vars(base) for base in bases), name


def test_schedule_calls_the_hooks() -> None:
    source = inspect.getsource(Schedule1F1B._step_microbatches)
    for name in ("backward_one_chunk", "perform_reduce_grad", "get_fwd_recv_ops"):
        assert f".{name}(" in source
    assert Schedule1F1B.__mro__[1] is PipelineScheduleSingle


def test_fsdp_methods() -> None:
    for name in (
        "set_is_last_backward",
        "set_reshard_after_backward",
        "set_requires_gradient_sync",
        "set_gradient_divide_factor",
        "set_force_sum_reduction_for_comms",
        "reshard",
    ):
        assert callable(getattr(FSDPModule, name))


def test_functions() -> None:
    assert callable(distributed_c10d._resolve_process_group)
    assert callable(distributed_c10d._set_pg_timeout)
    assert list(inspect.signature(_backward.stage_backward).parameters)[:3] == [
        "stage_output",
        "output_grads",
        "input_values",
    ]
