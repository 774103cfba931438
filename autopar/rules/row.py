"""Row-wise ops: results have the dims of the operand, some of which must be whole."""

from __future__ import annotations

from dataclasses import replace

from autopar.op_call import OpCall
from autopar.rules.dims import (
    aligned,
    broadcast,
    describe,
    named,
    positive,
    reduced_dims,
    shape_of,
    with_whole,
)
from autopar.rules.language import Dims, NoRuleError, Rule

# One row of `dim` at a time.
_NAMES_TEXT = """
softmax _softmax log_softmax _log_softmax special_softmax special_log_softmax _safe_softmax cumsum
cumprod logcumsumexp cummax cummin sort argsort topk glu
fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft
"""
NAMES = _NAMES_TEXT.split()
# As many rows at a time as `dim` names: all, when it names none.
_SEVERAL_TEXT = """
flip fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn fft_fftshift
fft_ifftshift
"""
SEVERAL = _SEVERAL_TEXT.split()
_LINEAR = {"cumsum", "flip", "roll", "rot90"}


def row_wise(op: OpCall) -> Rule:
    """Rows must be whole along `dim`."""
    return _along(op, {positive(int(op.named("dim")), len(op.types[0].shape))})


def rows_wise(op: OpCall) -> Rule:
    """Whole along every one of `dim` (or `dims`)."""
    return _along(op, reduced_dims(op, "dims" if op.op_name == "flip" else "dim"))


def roll(op: OpCall) -> Rule:
    """Elements move within `dims`; without dims through the whole tensor."""
    return _along(op, reduced_dims(op, "dims"))


def difference(op: OpCall) -> Rule:
    """`diff(x, n, dim)`, with what comes before and after along `dim`."""
    rank = len(shape_of(op, "self"))
    at = {positive(int(op.named("dim")), rank)}
    names = ("self", "prepend", "append")
    operands = {name: with_whole(rank, at, f"_{name}") for name in names}
    linear = [names] if op.types[0].dtype.is_floating_point else []
    return describe(op, operands, with_whole(rank, at, "_r"), linear=linear)


def msort(op: OpCall) -> Rule:
    return _along(op, {0})


def rotate(op: OpCall) -> Rule:
    """`rot90`: the two dims may swap their sizes."""
    return _along(op, reduced_dims(op, "dims"))


def renorm(op: OpCall) -> Rule:
    """The slices of `dim` are scaled each by its own norm."""
    rank = len(op.types[0].shape)
    return _along(op, set(range(rank)) - {positive(int(op.named("dim")), rank)})


def cross(op: OpCall) -> Rule:
    """Vectors of three along `dim`, of operands that broadcast."""
    shape = op.result.shape
    dim = op.named("dim")
    if dim is None:
        dim = next((i for i, s in enumerate(shape) if s == 3), None)
    if dim is None or len(op.types) != 2:
        raise NoRuleError("cross has no dim of 3", next_step="it is replicated")
    at = positive(int(dim), len(shape))
    names = ("self", "other")
    operands = {n: aligned(shape_of(op, n), shape) for n in names}
    return describe(op, operands, named(shape), whole=[f"d{at}"])


def similarity(op: OpCall) -> Rule:
    """cosine_similarity(x, y, dim) -> without dim; operands broadcast."""
    full, operands = _pair(op)
    at = positive(int(op.named("dim")), len(full))
    result = tuple(d for i, d in enumerate(named(full)) if i != at)
    return describe(op, operands, result, whole=[f"d{at}"])


def distance(op: OpCall) -> Rule:
    """pairwise_distance(x[..., k], y[..., k]) -> [...]; k whole."""
    full, operands = _pair(op)
    kept = named(full)[:-1]
    result = (*kept, ()) if op.named("keepdim") else kept
    return describe(op, operands, result, whole=[f"d{len(full) - 1}"])


def _pair(op: OpCall) -> tuple[tuple[int, ...], dict[str, Dims]]:
    shapes = {name: shape_of(op, name) for name in ("x1", "x2")}
    full = broadcast(*shapes.values())
    return full, {name: aligned(shape, full) for name, shape in shapes.items()}


def all_distances(op: OpCall) -> Rule:
    """cdist(x[b*, p, k], y[b*, r, k]) -> [b*, p, r]; k whole."""
    a, b = shape_of(op, "x1"), shape_of(op, "x2")
    lead = op.result.shape[:-2]
    x = (*aligned(a[:-2], lead), ("p",), ("_k",))
    y = (*aligned(b[:-2], lead), ("r",), ("_k",))
    return describe(op, {"x1": x, "x2": y}, (*named(lead), ("p",), ("r",)))


def searchsorted(op: OpCall) -> Rule:
    """Sorted rows whole; one row for all values, or one for each row of values."""
    rows, values = shape_of(op, "sorted_sequence"), shape_of(op, "self")
    dims = named(values)
    lead = dims[:-1] if len(rows) > 1 else ()
    return describe(op, {"sorted_sequence": (*lead, ("_k",)), "self": dims}, dims)


def _along(op: OpCall, whole: set[int]) -> Rule:
    """Dims pass through but those that are whole, whose size may change."""
    rank = len(op.types[0].shape)
    if len(op.types) != 1:
        raise NoRuleError(f"{op.op_name} of several tensors", next_step="it is replicated")
    name = "input" if op.named("input") is not None else "self"
    found = describe(op, {name: with_whole(rank, whole)}, with_whole(rank, whole, "_r"))
    if op.op_name.rstrip("_") in _LINEAR and op.types[0].dtype.is_floating_point:
        return replace(found, linear=(frozenset({0}),))
    return found
