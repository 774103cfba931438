"""Which tensors an op keeps for its backward: operands, results, or memory of its own.

Found by running the op on the meta device under `saved_tensors_hooks`, once per distinct call:
autograd itself answers, so an op without a rule is right too. Fused attention is the exception:
its kernel differs by device and meta takes the unfused path, so what it keeps is stated here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.cost.experts import assumed_imbalance
from autopar.experts import EXPERTS
from autopar.experts.assumed_rows import imbalance
from autopar.op_call import OpCall, Operand
from autopar.sequence_shards import ATTENTIONS


@dataclass(frozen=True, slots=True)
class Saved:
    """Indices of saved operands; whether the result is saved; bytes of further memory."""

    operands: frozenset[int] = frozenset()
    result: bool = False
    extra_bytes: int = 0


_NOTHING = Saved()
_cache: dict[Any, Saved] = {}


def saved_by(op: OpCall) -> Saved:
    """What `op` saves, with its operands' gradients as `op.types` tell."""
    if not any(t.requires_grad for t in op.types) or not any(t.requires_grad for t in op.results):
        return _NOTHING
    if not isinstance(op.target, torch._ops.OpOverload):
        return _NOTHING
    if op.op_name in ATTENTIONS:
        return _attention(op)
    if op.target.namespace == "autopar" and op.op_name not in EXPERTS:
        return _NOTHING
    factor = assumed_imbalance(op) if op.op_name in EXPERTS else 1.0
    key = (op.target, repr(op.args), repr(dict(op.kwargs)), op.types, op.copies, factor)
    if key not in _cache:
        with imbalance(factor):
            _cache[key] = _run(op)
    return _cache[key]


def _attention(op: OpCall) -> Saved:
    """The fused kernels keep q, k, v, the result, one float32 per query and head, and a floating
    mask.

    (torch's flash and memory-efficient attention; a boolean mask is first turned into a
    floating one, which is then what is kept.)
    """
    q = op.types[op.args[0].index]
    batch, heads, rows = q.shape[0], q.shape[1], q.shape[2]
    extra = 4 * batch * heads * rows
    kept = {a.index for a in op.args[:3] if isinstance(a, Operand)}
    mask = op.argument(3, "attn_mask")
    if isinstance(mask, Operand):
        kind = op.types[mask.index]
        if kind.dtype is torch.bool:
            extra += kind.numel * q.dtype.itemsize
        else:
            kept.add(mask.index)
    return Saved(frozenset(kept), True, extra)


def _run(op: OpCall) -> Saved:
    leaves = []
    for kind in op.types:
        leaf = torch.empty(kind.shape, dtype=kind.dtype, device="meta")
        leaves.append(leaf.requires_grad_(kind.requires_grad))
    # Views of the leaves: what an op gets in a graph is no leaf, and in-place ops refuse leaves.
    tensors = [leaf.view_as(leaf) for leaf in leaves]
    args, kwargs = _fill(op.args, tensors), _fill(dict(op.kwargs), tensors)
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages.setdefault(tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes())
        kept.append(tensor)
        return tensor

    kept: list[torch.Tensor] = []
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = op.target(*args, **kwargs)
    results = result if isinstance(result, list | tuple) else [result]
    operand_of = {t.untyped_storage()._cdata: i for i, t in enumerate(leaves)}
    result_ids = {r.untyped_storage()._cdata for r in results if isinstance(r, torch.Tensor)}
    operands, from_result, extra = set(), False, 0
    for identity, size in storages.items():
        if identity in operand_of:
            operands.add(operand_of[identity])
        elif identity in result_ids:
            from_result = True
        else:
            extra += size
    return Saved(frozenset(operands), from_result, extra)


def _fill(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, Operand):
        return tensors[value.index]
    if isinstance(value, list | tuple):
        return type(value)(_fill(v, tensors) for v in value)
    if isinstance(value, dict):
        return {k: _fill(v, tensors) for k, v in value.items()}
    return value
