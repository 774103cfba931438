"""The names of torch that are not public or not stable, each behind one name, in one place.

`tests/runtime/test_torch_compat.py` fails when a torch release moves one of them.
"""

from __future__ import annotations

import datetime
import importlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.autograd.graph import GradientEdge
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, _backward, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.distributed.tensor import DTensor, Shard

from autopar.errors import PlanError

# Methods of `PipelineStage` that `autopar.runtime.pipeline_stage` overrides: without the first two
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
# Those that `autopar.runtime.interleaved` overrides as well.
LOOPED_STAGE_HOOKS = (
    "backward_maybe_with_nosync",
    "get_fwd_send_ops",
    "get_bwd_send_ops",
    "backward_one_chunk",
)
# Those that `autopar.runtime.zero_bubble` overrides as well.
DIVIDED_STAGE_HOOKS = (
    "backward_maybe_with_nosync",
    "backward_one_chunk",
    "get_local_bwd_output",
    "set_local_bwd_input",
)

_c10d: Any = distributed_c10d
# The update that the class makes, on tensors that are given.
adamw: Any = importlib.import_module("torch.optim.adamw").adamw

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


def flat_mesh(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh:
    """Neighbouring axes of a mesh as one, by a name of its own."""
    return mesh[axes]._flatten(name)


def shared_store() -> Any:
    """The store through which the ranks of the default group found each other."""
    return _c10d._get_default_store()


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


def weight_groups(
    outputs: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor],
    weights: Iterable[torch.nn.Parameter],
) -> tuple[list[tuple[list[Any], list[torch.nn.Parameter]]], list[bool]]:
    """Weights by the ops that read them: autograd's nodes between `outputs` and `inputs` at which
    the paths to the weights of a group branch off, and these weights, in the order of `weights`.
    No node and no weight is in two groups. And of each output whether it is made of any of the
    `inputs`.

    (torch 2.13's own `get_param_groups` leaves a node in two groups where one weight joins them:
    its gradient counts twice then.)
    """
    private: Any = _backward
    ends, starts = _nodes(outputs), _nodes(inputs)
    reverse = private.construct_reverse_graph(ends)
    behind, _ = private.reverse_closure(starts, set(), reverse)
    given = list(weights)
    # Of each group its nodes and the numbers of its weights; and the group of every node.
    groups: dict[int, tuple[set[Any], list[int]]] = {}
    group_of: dict[Any, int] = {}
    for number, weight in enumerate(given):
        _, readers = private.reverse_closure(_nodes([weight]), behind, reverse)
        if not readers:
            continue
        joined = sorted({group_of[node] for node in readers if node in group_of})
        nodes, numbers = set(readers), [number]
        for other in joined:
            its_nodes, its_numbers = groups.pop(other)
            nodes, numbers = nodes | its_nodes, its_numbers + numbers
        first = min(numbers)
        groups[first] = nodes, sorted(numbers)
        group_of.update(dict.fromkeys(nodes, first))
    found = [
        (sorted(nodes, key=lambda node: node._sequence_nr()), [given[i] for i in numbers])
        for _, (nodes, numbers) in sorted(groups.items())
    ]
    return found, _lead_to(ends, starts, reverse)


def made_of(outputs: Iterable[torch.Tensor], weight: torch.nn.Parameter) -> bool:
    """Whether autograd comes from any of the `outputs` to the weight."""
    private: Any = _backward
    ends = _nodes(outputs)
    return any(_lead_to(ends, _nodes([weight]), private.construct_reverse_graph(ends)))


def _lead_to(ends: Sequence[Any], starts: Sequence[Any], reverse: Any) -> list[bool]:
    private: Any = _backward
    behind, _ = private.reverse_closure(starts, set(), reverse)
    return [node in behind for node in ends]


def _nodes(tensors: Iterable[torch.Tensor]) -> list[Any]:
    private: Any = _backward
    found = [private._get_grad_fn_or_grad_acc(tensor) for tensor in tensors]
    return [node for node in found if node is not None]


def gradient_edge(node: Any, index: int) -> GradientEdge:
    """Where the gradient of an op's result of that number enters its backward."""
    return GradientEdge(node, index)


def batch_p2p(operations: list[Any]) -> list[Any]:
    """Start sends or receives; what to wait for."""
    private: Any = schedules
    started: list[Any] = private._batch_p2p(operations) if operations else []
    return started


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


def run_kernel(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op's own kernel, in which dispatch modes that are active see every op."""
    device = next((a.device.type for a in args if isinstance(a, torch.Tensor)), "cpu")
    keys: Any = torch._C
    key = keys.DispatchKey.CUDA if device == "cuda" else keys.DispatchKey.CPU
    return func.redispatch(keys.DispatchKeySet(key), *args, **kwargs)


def fsdp_groups(module: torch.nn.Module) -> list[Any]:
    """FSDP2's groups of parameters that are gathered together, of all modules in `module`."""
    found: list[Any] = []
    for part in module.modules():
        if isinstance(part, FSDPModule):
            state: Any = part._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            found += groups if groups is not None else [state._fsdp_param_group]
    return [group for group in found if group is not None]


class ShardOver:
    """What FSDP2's `shard_placement_fn` answers for parameters that are sharded over another mesh
    than their module. It wants one such object for all parameters of a mesh.

    Raises `PlanError` where torch has no such answer.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        common: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
        if not hasattr(common, "ShardPlacementResult"):
            raise PlanError(
                f"FSDP2 of torch {torch.__version__} shards all parameters of a block over one "
                "mesh, and the plan splits experts over ep",
                next_step="use torch 2.13 or later, ZeRO level 0, or a plan without ep",
            )
        self._answer = common.ShardPlacementResult
        self._info = common.FSDPMeshInfo(mesh, shard_mesh_dim=0)

    def along(self, dim: int) -> Any:
        return self._answer(Shard(dim), self._info)


def laid_out_as(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """`local` as this rank's part of a tensor that is sharded as `like` is. It may be on another
    device than the mesh, which public ways to make a DTensor don't allow."""
    if not isinstance(like, DTensor):
        return local
    make: Any = DTensor
    found: torch.Tensor = make(local, like._spec, requires_grad=False)
    return found


def release_reductions(module: torch.nn.Module) -> None:
    """Let FSDP2 forget what its last reduction of gradients read: it holds that to the next one,
    which is in the next backward. Before torch 2.13 it stays held."""
    for group in fsdp_groups(module):
        states = getattr(group.comm_ctx, "reduce_scatter_states", None)
        while states:
            state = states.pop(0)
            if state.event is not None:
                group.device_handle.current_stream().wait_event(state.event)


def fsdp_group_of(module: torch.nn.Module) -> dict[torch.nn.Parameter, Any]:
    """FSDP2's group of each trained parameter that is gathered now, in all modules in `module`."""
    return {
        parameter.unsharded_param: group
        for group in fsdp_groups(module)
        for parameter in group.fsdp_params
        if hasattr(parameter, "_unsharded_param") and parameter.unsharded_param.requires_grad
    }


def finish_reductions(module: torch.nn.Module) -> None:
    """What FSDP2's root does where a backward ends, for gradients that no backward pass of the
    whole module made."""
    assert isinstance(module, FSDPModule)
    state: Any = module._get_fsdp_state()
    state._root_post_backward_final_callback()


def kept_gradients(group: Any) -> list[torch.Tensor]:
    """What an FSDP2 group keeps from one backward to the next beside the gradients of its
    parameters: whole ones, or shards that are still to be summed over copies."""
    found = [group._partial_reduce_output]
    for parameter in group.fsdp_params:
        whole = getattr(parameter, "_unsharded_param", None)
        kept = parameter.unsharded_accumulated_grad
        found += [kept if kept is not None else getattr(whole, "grad", None)]
    return [gradient for gradient in found if gradient is not None]


def fake_store() -> Any:
    """The store of torch's "fake" process group, which the import registers."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


@contextmanager
def without_values() -> Iterator[None]:
    """Where torch itself reads numbers that a dry run does not have.

    It looks for this rank among the numbers of a `DeviceMesh` when it takes a mesh apart or, as
    FSDP2 does, puts two together: they stay real. And stages of a pipeline vote whether all know
    their shapes, which they do.
    """
    own = {name: vars(DeviceMesh)[name] for name in ("__getitem__", "_concatenate")}
    base: Any = PipelineScheduleSingle.__mro__[1]
    vote = vars(base).get("_warmup_p2p")  # new in torch 2.13

    def all_know(self: Any, stages: Any, *rest: Any) -> None:
        mode: Any = importlib.import_module("torch.distributed.pipelining.stage")
        for stage in stages:
            stage._inference_mode = mode.InferenceMode.STATIC

    def real(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return call

    for name, found in own.items():
        static = isinstance(found, staticmethod)
        made = staticmethod(real(found.__func__)) if static else real(found)
        setattr(DeviceMesh, name, made)
    if vote is not None:
        base._warmup_p2p = all_know
    try:
        yield
    finally:
        if vote is not None:
            base._warmup_p2p = vote
        for name, found in own.items():
            setattr(DeviceMesh, name, found)
