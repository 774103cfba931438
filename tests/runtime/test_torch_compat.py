"""The private names of torch that the runtime relies on are there."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    _backward,
    schedules,
)
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from autopar.errors import PlanError
from autopar.runtime import torch_compat
from autopar.runtime.interleaved import LoopedStage
from autopar.runtime.pipeline_stage import PlannedStage
from autopar.runtime.zero_bubble import DividedStage


@pytest.mark.parametrize(
    ("stage", "hooks"),
    [
        (PlannedStage, torch_compat.STAGE_HOOKS),
        (LoopedStage, torch_compat.LOOPED_STAGE_HOOKS),
        (DividedStage, torch_compat.DIVIDED_STAGE_HOOKS),
    ],
)
def test_stage_hooks(stage: type, hooks: tuple[str, ...]) -> None:
    """What is overridden is what torch defines."""
    torchs = [base for base in stage.__mro__ if base.__module__.startswith("torch.")]
    for name in hooks:
        assert name in vars(stage), name
        assert any(name in vars(base) for base in torchs), name


FSDP_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group"


def test_schedule_calls_the_hooks() -> None:
    source = inspect.getsource(Schedule1F1B._step_microbatches)
    for name in ("backward_one_chunk", "perform_reduce_grad", "get_fwd_recv_ops"):
        assert f".{name}(" in source
    assert Schedule1F1B.__mro__[1] is PipelineScheduleSingle
    looped = inspect.getsource(ScheduleInterleaved1F1B._step_microbatches)
    for name in torch_compat.LOOPED_STAGE_HOOKS[1:]:
        assert f"stage.{name}(" in looped


def test_halves_of_a_backward() -> None:
    """What torch's stage hands from the first half to the second, and what finds the weights."""
    source = inspect.getsource(DividedStage.__mro__[4])
    for text in (
        '"input", bwd_kwargs, last_backward=last_backward',
        '"weight", bwd_kwargs, last_backward=last_backward',
        "self.backward_state[bwd_chunk_id] = (",
        "if not self.is_first:",
    ):
        assert text in source
    for name in ("_get_grad_fn_or_grad_acc", "construct_reverse_graph", "reverse_closure"):
        assert callable(getattr(_backward, name))
    assert callable(torch.ones(1, requires_grad=True).sin().grad_fn._sequence_nr)
    state = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_state").FSDPState
    assert callable(state._root_post_backward_final_callback)
    assert callable(importlib.import_module(FSDP_GROUP).FSDPParamGroup.post_backward)


def test_fsdp_methods() -> None:
    for name in (
        "set_is_last_backward",
        "set_reshard_after_backward",
        "set_requires_gradient_sync",
        "set_requires_all_reduce",
        "set_gradient_divide_factor",
        "set_force_sum_reduction_for_comms",
        "reshard",
    ):
        assert callable(getattr(FSDPModule, name))


def test_what_hybrid_sharding_keeps_between_backwards() -> None:
    group = inspect.getsource(importlib.import_module(FSDP_GROUP).FSDPParamGroup)
    assert "self._partial_reduce_output: torch.Tensor | None" in group


def test_functions() -> None:
    assert callable(schedules._batch_p2p)
    assert callable(distributed_c10d._resolve_process_group)
    assert callable(distributed_c10d._set_pg_timeout)
    assert list(inspect.signature(_backward.stage_backward).parameters)[:3] == [
        "stage_output",
        "output_grads",
        "input_values",
    ]


def test_another_mesh_for_some_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """What FSDP2 asks for each parameter has the fields that it reads; without them it is told."""
    common = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    names = set(inspect.signature(common.ShardPlacementResult).parameters)
    assert names == {"placement", "mesh_info"}
    assert "shard_placement_fn" in inspect.signature(fully_shard).parameters
    monkeypatch.delattr(common, "ShardPlacementResult")
    mesh: Any = None
    with pytest.raises(PlanError, match="shards all parameters of a block over one mesh"):
        torch_compat.ShardOver(mesh)
