"""Reductions over dims. A sharded summed factor makes the result a partial sum."""

from __future__ import annotations

from dataclasses import replace

from autopar.op_call import OpCall, Operand
from autopar.rules import pointwise
from autopar.rules.dims import named, reduced_dims
from autopar.rules.language import Dims, Rule

# Reduced dims stay whole; results are one tensor or a pair (value and index, mean and variance).
_NAMES_TEXT = """
amax amin argmax argmin any all aminmax logsumexp special_logsumexp prod var std var_mean std_mean
median nanmedian mode kthvalue nansum nanmean count_nonzero norm linalg_vector_norm linalg_norm
linalg_matrix_norm frobenius_norm nuclear_norm
"""
NAMES = _NAMES_TEXT.split()


def _reduce(op: OpCall, *, summed: bool) -> Rule:
    shape = op.types[0].shape
    gone = reduced_dims(op)
    keep = len(op.result.shape) == len(shape)
    operand: Dims = named(shape)
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
    return replace(_reduce(op, summed=False), linear=(frozenset({0}),))


def extreme_or_pointwise(op: OpCall) -> Rule | None:
    """`max` and `min` of two tensors, else over a dim or over all."""
    return pointwise.rule(op) if op.overload == "other" else extreme(op)


def extreme(op: OpCall) -> Rule | None:
    """One tensor, reduced over `dim` or over all dims."""
    if len(op.types) != 1 or not isinstance(op.args[0], Operand):
        return None
    return _reduce(op, summed=False)
