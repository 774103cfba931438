"""Seconds and FLOPs of one op call on one rank, forward and backward, from its local shapes.

The backward follows from the forward: a contraction has one product of the same FLOPs for each
operand that needs a gradient; attention repeats its scores (2.5 times the forward); an
element-wise op reads what it saved and writes the gradients. Ops that only change strides cost
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Device
from autopar.cost.compute import op_time
from autopar.op_call import OpCall, Operand
from autopar.program import TensorType

_VIEWS_TEXT = """
view reshape _unsafe_view flatten unflatten expand transpose permute t unsqueeze squeeze slice
select split split_with_sizes chunk getitem detach alias contiguous copy first_rank_gradient
send recv sym_size unbind
"""
VIEWS = frozenset(_VIEWS_TEXT.split())
CONTRACTIONS = frozenset(["linear", "mm", "addmm", "bmm", "matmul", "baddbmm"])
# Fused attention computes its scores again: five products for the forward's two.
ATTENTION_BACKWARD = 2.5


@dataclass(frozen=True, slots=True)
class OpCost:
    """`bound`: compute, memory or launch (of the forward); zero everywhere for views."""

    forward_seconds: float
    backward_seconds: float
    forward_flops: float
    backward_flops: float
    bytes_moved: float
    bound: str


_FREE = OpCost(0.0, 0.0, 0.0, 0.0, 0.0, "memory")


def is_view(op: OpCall) -> bool:
    return op.op_name in VIEWS and not op.copies


def op_flops(op: OpCall, flops: float) -> tuple[float, float]:
    """FLOPs of forward and backward, from those of the forward (`flops`, of the op's rule)."""
    if not flops or is_view(op) or not op.results:
        return 0.0, 0.0
    if not any(t.requires_grad for t in op.results):
        return flops, 0.0
    if op.op_name in CONTRACTIONS:
        return flops, flops * sum(t.requires_grad for t in _factors(op))
    return flops, ATTENTION_BACKWARD * flops if any(t.requires_grad for t in op.types) else 0.0


def op_cost(op: OpCall, flops: float, device: Device) -> OpCost:
    """Price of `op`, whose types are local; `flops` are the local FLOPs of its forward."""
    if is_view(op) or not op.results:
        return _FREE
    grads = [t for t in op.types if t.requires_grad]
    moved = _bytes_moved(op)
    if op.op_name in CONTRACTIONS and flops:
        return _contraction(op, flops, moved, device)
    dtype = _dtype(op.result)
    keys = None
    work = flops
    if op.op_name == "scaled_dot_product_attention":
        key = op.args[1]
        keys = op.types[key.index].shape[2] if isinstance(key, Operand) else None
        work = flops / 2 if op.argument(5, "is_causal", False) else flops
    forward = op_time(
        flops=work,
        bytes_moved=moved,
        dtype=dtype,
        device=device,
        is_matmul=flops > 0,
        attention_keys=keys,
    )
    if not grads or not any(t.requires_grad for t in op.results):
        return OpCost(forward.seconds, 0.0, flops, 0.0, moved, forward.bound)
    back_flops = op_flops(op, flops)[1]
    back_bytes = moved + sum(t.nbytes for t in grads)  # an embedding's gradient is dense
    backward = op_time(
        flops=ATTENTION_BACKWARD * work,
        bytes_moved=back_bytes,
        dtype=dtype,
        device=device,
        is_matmul=flops > 0,
        attention_keys=keys,
    )
    return OpCost(forward.seconds, backward.seconds, flops, back_flops, moved, forward.bound)


def _bytes_moved(op: OpCall) -> float:
    """Bytes read and written: operands and results once; a lookup reads only the rows it returns;
    cross entropy makes three passes over the logits (maximum, sum, normalised copy)."""
    results = sum(t.nbytes for t in op.results)
    if op.op_name in ("embedding", "vocab_embedding"):
        return float(2 * results + op.types[1].nbytes)
    if "cross_entropy" in op.op_name:
        return float(3 * op.types[0].nbytes)
    return float(sum(t.nbytes for t in op.types) + results)


def _contraction(op: OpCall, flops: float, moved: float, device: Device) -> OpCost:
    """One product forward; backward one product for each factor that needs a gradient."""
    a, b = _factors(op)
    dtype = _dtype(op.result)
    n = op.result.shape[-1]
    k = a.shape[-1]
    m = op.result.numel // n  # batch dims are folded into the rows
    batch = 1 if op.op_name == "linear" else b.numel // (k * n)

    def product(shape: tuple[int, int, int]) -> tuple[float, str]:
        time = op_time(
            flops=flops,
            bytes_moved=moved,
            dtype=dtype,
            device=device,
            is_matmul=True,
            matmul_shape=shape,
        )
        return time.seconds, time.bound

    forward, bound = product((m, n, k))
    backward = 0.0
    if a.requires_grad:
        backward += product((m, k, n))[0]
    if b.requires_grad:
        backward += product((n * batch, k, m // batch))[0]
    return OpCost(forward, backward, flops, op_flops(op, flops)[1], moved, bound)


def _factors(op: OpCall) -> tuple[TensorType, TensorType]:
    position = 1 if op.op_name in ("addmm", "baddbmm") else 0
    first, second = op.args[position], op.args[position + 1]
    assert isinstance(first, Operand) and isinstance(second, Operand)
    return op.types[first.index], op.types[second.index]


def _dtype(tensor: TensorType) -> str:
    return str(tensor.dtype).removeprefix("torch.")
