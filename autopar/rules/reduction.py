"""Reductions and row-wise functions. A sharded summed factor makes the result a partial sum."""

from __future__ import annotations

from autopar.op_call import OpCall
from autopar.rules.language import Dims, Rule


def _dims(op: OpCall, position: int = 1) -> set[int]:
    rank = len(op.types[0].shape)
    dim = op.argument(position, "dim")
    if dim is None or dim == []:
        return set(range(rank))
    return {int(d) % rank for d in (dim if isinstance(dim, list | tuple) else [dim])}


def _reduce(op: OpCall, *, summed: bool) -> Rule:
    shape = op.types[0].shape
    gone = _dims(op)
    keep = len(op.result.shape) == len(shape)
    operand: Dims = tuple((f"d{i}",) for i in range(len(shape)))
    result: Dims = tuple(
        () if i in gone else d for i, d in enumerate(operand) if keep or i not in gone
    )
    sizes = {f"d{i}": s for i, s in enumerate(shape)}
    whole = frozenset() if summed else frozenset(f"d{i}" for i in gone)
    return Rule(
        (operand,), (result,) * len(op.results), sizes, whole, (frozenset({0}),) if summed else ()
    )


def sum_(op: OpCall) -> Rule:
    return _reduce(op, summed=op.types[0].dtype.is_floating_point)


def mean(op: OpCall) -> Rule:
    """The mean over a sharded dim is not the sum of the local means: that dim stays whole."""
    rule = _reduce(op, summed=False)
    return Rule(rule.operands, rule.results, rule.sizes, rule.whole, (frozenset({0}),))


def extreme(op: OpCall) -> Rule:
    """amax, amin, argmax, any, all, var, std: reduced dims stay whole."""
    return _reduce(op, summed=False)


def softmax(op: OpCall) -> Rule:
    """Rows must be whole along `dim`."""
    shape = op.types[0].shape
    at = int(op.argument(1, "dim")) % len(shape)
    dims: Dims = tuple((f"d{i}",) for i in range(len(shape)))
    sizes = {f"d{i}": s for i, s in enumerate(shape)}
    return Rule((dims,), (dims,), sizes, frozenset({f"d{at}"}))


def cumsum(op: OpCall) -> Rule:
    rule = softmax(op)
    return Rule(rule.operands, rule.results, rule.sizes, rule.whole, (frozenset({0}),))


def normalization(op: OpCall) -> Rule:
    """layer_norm and rms_norm: x[..., d], weight[d], bias[d]; d must be whole."""
    normalized = len(op.argument(1, "normalized_shape"))
    rank = len(op.types[0].shape)
    dims: Dims = tuple((f"d{i}",) for i in range(rank))
    affine = dims[rank - normalized :]
    sizes = {f"d{i}": s for i, s in enumerate(op.types[0].shape)}
    whole = frozenset(d[0] for d in affine)
    return Rule((dims, *([affine] * (len(op.types) - 1))), (dims,), sizes, whole)
