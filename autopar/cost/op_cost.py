"""Seconds and FLOPs of one op call on one rank, forward and backward, from its local shapes.

The backward follows from the forward: a contraction has one product of the same FLOPs for each
operand that needs a gradient, and that for a weight is told apart (schedules can delay it);
attention repeats its scores (2.5 times the forward); an element-wise op reads what it saved and
writes the gradients. Ops that only change strides cost nothing. An op of a fused kernel (device
execution `compile`, see `autopar.passes.analysis.fusion`) moves only what the kernel reads and
writes; its backward computes the chain again from what the kernel read.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Device
from autopar.cost.attention_efficiency import BACKWARD_PRODUCTS, attention_seconds
from autopar.cost.compute import OpTime, op_time
from autopar.cost.experts import backward_flops, experts_time
from autopar.cost.matmul_efficiency import matmul_rate, matmul_seconds
from autopar.experts import EXPERTS
from autopar.op_call import Fusion, OpCall, Operand
from autopar.program import TensorType
from autopar.reshard import RESHARDS
from autopar.sequence_shards import ATTENTION_ROWS, ATTENTIONS, rows_share

_VIEWS_TEXT = """
view reshape _unsafe_view flatten unflatten expand transpose permute t unsqueeze squeeze slice
select split split_with_sizes tensor_split chunk getitem detach alias contiguous copy
first_rank_gradient send recv sym_size unbind narrow movedim moveaxis swapaxes swapdims numpy_T mT
adjoint matrix_H expand_as broadcast_to view_as reshape_as ravel diagonal unfold view_as_real
view_as_complex real meshgrid broadcast_tensors
"""
VIEWS = frozenset(_VIEWS_TEXT.split())
CONTRACTIONS = frozenset(["linear", "mm", "addmm", "bmm", "matmul", "baddbmm"])
# An addend comes before the two factors.
_ADDING = frozenset(["addmm", "baddbmm", "addbmm", "addmv"])


@dataclass(frozen=True, slots=True)
class OpCost:
    """`bound`: compute, memory or launch (of the forward), `communication` for a collective; zero
    everywhere for views. `weight_seconds`: the part of `backward_seconds` for a weight's gradient.
    """

    forward_seconds: float
    backward_seconds: float
    forward_flops: float
    backward_flops: float
    bytes_moved: float
    bound: str
    weight_seconds: float = 0.0


_FREE = OpCost(0.0, 0.0, 0.0, 0.0, 0.0, "memory")


def is_view(op: OpCall) -> bool:
    return op.op_name in VIEWS and not op.copies and op.registered_name != "aten::copy"


def is_reshard(op: OpCall) -> bool:
    """A reshard that is an op of the graph (of the axis cp): its price is that of its messages."""
    namespace, _, name = op.registered_name.partition("::")
    return namespace == "autopar" and name in RESHARDS


def op_flops(op: OpCall, flops: float) -> tuple[float, float]:
    """FLOPs of forward and backward, from those of the forward (`flops`, of the op's rule)."""
    if not flops or is_view(op) or not op.results:
        return 0.0, 0.0
    if not any(t.requires_grad for t in op.results):
        return flops, 0.0
    if op.op_name in ATTENTIONS:
        return flops, BACKWARD_PRODUCTS * flops if any(t.requires_grad for t in op.types) else 0.0
    if op.op_name in EXPERTS:
        return flops, backward_flops(op, flops)
    return flops, flops * sum(t.requires_grad for t in _multiplied(op))


def _multiplied(op: OpCall) -> list[TensorType]:
    """The operands that are multiplied: no bias, no addend. All of them for an op from outside."""
    if op.op_name in _ADDING:
        args = op.args[1:3]
    elif op.op_name == "einsum":
        args = tuple(op.args[1])
    elif op.registered_name.startswith("aten::"):
        args = op.args[:2]
    else:
        return list(op.types)
    return [op.types[a.index] for a in args if isinstance(a, Operand)]


def op_cost(op: OpCall, flops: float, device: Device) -> OpCost:
    """Price of `op`, whose types are local; `flops` are the local FLOPs of its forward."""
    if is_view(op) or is_reshard(op) or not op.results:
        return _FREE
    if op.op_name in CONTRACTIONS and flops:
        return _contraction(op, flops, device)
    if op.op_name in ATTENTIONS and flops:
        return _attention(op, flops, device)
    if op.op_name in EXPERTS:
        time = experts_time(op, device)
        back, moved = op_flops(op, flops)[1], time.bytes_moved
        seconds = time.forward.seconds
        return OpCost(seconds, time.backward, flops, back, moved, time.forward.bound, time.weights)
    if op.fusion is not None and device.execution == "compile":
        return _fused(op, op.fusion, flops, device)
    moved = _bytes_moved(op)
    arithmetic = flops / matmul_rate(_dtype(op.result), device)
    forward = op_time(arithmetic, moved, device)
    back_flops = op_flops(op, flops)[1]
    back = 0.0
    if _needs_backward(op):
        grads = sum(t.nbytes for t in op.types if t.requires_grad)  # an embedding's is dense
        arithmetic = back_flops / matmul_rate(_dtype(op.result), device)
        back = op_time(arithmetic, moved + grads, device).seconds
    return OpCost(forward.seconds, back, flops, back_flops, moved, forward.bound)


def _needs_backward(op: OpCall) -> bool:
    return any(t.requires_grad for t in op.types) and any(t.requires_grad for t in op.results)


def _bytes_moved(op: OpCall) -> float:
    """Bytes read and written: operands and results once; a lookup reads only the rows it returns;
    cross entropy makes three passes over the logits (maximum, sum, normalised copy)."""
    results = sum(t.nbytes for t in op.results)
    if op.op_name in ("embedding", "vocab_embedding"):
        return float(2 * results + op.types[1].nbytes)
    if "cross_entropy" in op.op_name:
        return float(3 * op.types[0].nbytes)
    return float(sum(t.nbytes for t in op.types) + results)


def _fused(op: OpCall, fusion: Fusion, flops: float, device: Device) -> OpCost:
    """The op's part of a fused kernel. The kernel of the backward reads the same operands and the
    gradients of what was written, and writes the gradients of the operands."""
    reads = [op.types[i] for i in fusion.reads]
    read = sum(t.nbytes for t in reads)
    written = sum(t.nbytes for t in op.results) if fusion.writes else 0
    forward = op_time(0.0, float(read + written), device, starts=fusion.starts)
    backward = 0.0
    if _needs_backward(op):
        grads = sum(t.nbytes for t in reads if t.requires_grad)
        moved = float(read + written + grads)
        backward = op_time(0.0, moved, device, starts=fusion.starts).seconds
    return OpCost(
        forward.seconds,
        backward,
        flops,
        op_flops(op, flops)[1],
        float(read + written),
        forward.bound,
    )


def _attention(op: OpCall, flops: float, device: Device) -> OpCost:
    """Fused attention: q [..., heads, queries, head dim] and keys [..., keys, head dim]."""
    query, key = (op.types[a.index] for a in op.args[:2] if isinstance(a, Operand))
    queries, head_dim = query.shape[-2:]
    rows = op.op_name == ATTENTION_ROWS
    causal = rows or bool(op.argument(5, "is_causal", False))
    done = rows_share(queries, key.shape[-2]) if rows else 0.5 if causal else 1.0
    moved = _bytes_moved(op)

    def time(part: float, nbytes: float, *, backward: bool) -> OpTime:
        arithmetic = attention_seconds(
            part * (done * flops),
            heads=max(1, query.numel // max(1, queries * head_dim)),
            queries=queries,
            keys=key.shape[-2],
            head_dim=head_dim,
            causal=causal,
            backward=backward,
            dtype=_dtype(op.result),
            device=device,
        )
        return op_time(arithmetic, nbytes, device)

    forward, back = time(1.0, moved, backward=False), 0.0
    if _needs_backward(op):
        grads = sum(t.nbytes for t in op.types if t.requires_grad)
        back = time(BACKWARD_PRODUCTS, moved + grads, backward=True).seconds
    return OpCost(forward.seconds, back, flops, op_flops(op, flops)[1], moved, forward.bound)


def _contraction(op: OpCall, flops: float, device: Device) -> OpCost:
    """One product forward; backward one product for each factor that needs a gradient. What is
    multiplied by a matrix that has no batch dims is taken for an activation, and that for a weight.
    """
    a, b = _factors(op)
    moved = _bytes_moved(op)
    dtype = _dtype(op.result)
    k = a.shape[-1]
    weight = op.op_name == "linear" or len(b.shape) <= 2
    batch = 1 if weight else b.numel // max(1, k * b.shape[-1])
    n = b.numel // max(1, k * batch)
    m = a.numel // max(1, k * batch)

    def product(rows: int, columns: int, inner: int) -> OpTime:
        return op_time(matmul_seconds(batch, rows, columns, inner, dtype, device), moved, device)

    forward = product(m, n, k)
    values = product(m, k, n).seconds if a.requires_grad else 0.0
    weights = product(n, k, m).seconds if b.requires_grad else 0.0
    return OpCost(
        forward.seconds,
        values + weights,
        flops,
        op_flops(op, flops)[1],
        moved,
        forward.bound,
        weights if weight else 0.0,
    )


def _factors(op: OpCall) -> tuple[TensorType, TensorType]:
    position = 1 if op.op_name in ("addmm", "baddbmm") else 0
    first, second = op.args[position], op.args[position + 1]
    assert isinstance(first, Operand) and isinstance(second, Operand)
    return op.types[first.index], op.types[second.index]


def _dtype(tensor: TensorType) -> str:
    return str(tensor.dtype).removeprefix("torch.")
