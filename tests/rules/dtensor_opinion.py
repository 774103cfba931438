"""What DTensor makes of an op whose operands are placed as a strategy of ours says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.op_call import OpCall
from autopar.placement import Placement
from autopar.rules import rule_for
from autopar.rules.strategy import Strategy, strategies
from tests.rules.execution import Call, op_call_of, run

Tensor = torch.Tensor
RANKS = 2


@dataclass(frozen=True)
class Opinion:
    """`moved`: DTensor moved data first, so it has no opinion on these placements. Placements as
    text, theirs and ours, of the result and of each operand's gradient (of none where the backward
    moved data). `equal`: to the value of the whole op."""

    op: str
    strategy: str
    moved: bool
    result: tuple[str, str] = ("", "")
    gradients: tuple[tuple[str, str], ...] = ()
    equal: bool = True


def opinions(calls: list[Call]) -> list[Opinion]:
    """One for each strategy of each call. Makes a process group of its own: for a fresh process."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    mesh = init_device_mesh("cpu", (RANKS,))
    found = []
    with LocalTensorMode(RANKS):
        for made in calls:
            op, operands = op_call_of(made)
            for strategy in strategies(op, rule_for(op), RANKS):
                if not strategy.local_op:  # an op of ours, unknown to DTensor
                    found.append(_opinion(op, operands, strategy, mesh))
    return found


def _theirs(placement: Placement) -> dt.Placement:
    if placement.is_shard:
        return dt.Shard(placement.dim)
    return dt.Partial() if placement.kind == "P" else dt.Replicate()


def _conjugate(placement: Placement) -> dt.Placement:
    """Where a gradient lives for a value in this placement."""
    if placement.is_shard:
        return dt.Shard(placement.dim)
    return dt.Partial() if placement.gradient_is_partial else dt.Replicate()


def _distributed(value: Tensor, placement: dt.Placement, mesh: DeviceMesh) -> dt.DTensor:
    if isinstance(placement, dt.Shard):
        return dt.distribute_tensor(value, mesh, [placement])
    # Terms of a sum: (r + 1) parts of 1 + 2 + ... for rank r.
    total = RANKS * (RANKS + 1) // 2
    terms = {
        rank: value * (rank + 1) / total if placement.is_partial() else value.clone()
        for rank in range(RANKS)
    }
    return dt.DTensor.from_local(LocalTensor(terms), mesh, [placement], run_check=False)


def _opinion(op: OpCall, operands: list[Tensor], strategy: Strategy, mesh: DeviceMesh) -> Opinion:
    placed = [
        _distributed(t.detach(), _theirs(p), mesh).requires_grad_(t.requires_grad)
        for t, p in zip(operands, strategy.operands, strict=True)
    ]
    name = op.op_name
    moves = CommDebugMode()
    try:
        with moves:
            result: Any = run(op.target, op.args, op.kwargs, placed)
    except (RuntimeError, NotImplementedError):
        return Opinion(name, strategy.name, True)
    if moves.get_total_counts() or not isinstance(result, dt.DTensor):
        return Opinion(name, strategy.name, True)
    results = (str(result.placements[0]), str(_theirs(strategy.result)))
    whole = run(op.target, op.args, op.kwargs, [t.detach() for t in operands])
    equal = _same_on_all(result.detach().full_tensor(), whole)
    wanted = [t for t in placed if t.requires_grad]
    if not wanted or not result.requires_grad or results[0] != results[1]:
        return Opinion(name, strategy.name, False, results, (), equal)
    gradient = _distributed(torch.ones_like(whole), _conjugate(strategy.result), mesh)
    ours = [p for t, p in zip(placed, strategy.operands, strict=True) if t.requires_grad]
    with CommDebugMode() as moves:
        got = torch.autograd.grad(result, wanted, gradient, allow_unused=True)
    pairs = tuple(
        (str(g.placements[0]), str(_conjugate(p)))
        for g, p in zip(got, ours, strict=True)
        if isinstance(g, dt.DTensor) and not moves.get_total_counts()
    )
    return Opinion(name, strategy.name, False, results, pairs, equal)


def _same_on_all(value: Any, whole: Tensor) -> bool:
    """A value of LocalTensor mode holds that of every rank."""
    held = value._local_tensors.values() if hasattr(value, "_local_tensors") else [value]
    return all(torch.allclose(each, whole) for each in held)
