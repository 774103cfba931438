"""Ops that repeat, cut out or lay out anew: repeat, tile, unbind, diagonal, unfold, new_zeros."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from autopar.op_call import OpCall, Operand
from autopar.rules.dims import aligned, describe, named, positive, shape_of, with_whole
from autopar.rules.language import Dims, Rule

_SELF = (("self",),)
CONSTANTS = ("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided")
_MATRIX_TEXT = """
inverse linalg_inv linalg_cholesky cholesky linalg_det det logdet linalg_slogdet slogdet
linalg_matrix_exp matrix_exp linalg_svdvals linalg_eigvalsh
"""
MATRIX_FUNCTIONS = _MATRIX_TEXT.split()


def repeat(op: OpCall) -> Rule:
    """repeat and tile: x[d] -> [(r d)]; a dim that is not repeated is free."""
    shape = shape_of(op, "self")
    counts = [int(c) for c in op.named("repeats" if op.op_name == "repeat" else "dims")]
    counts = [1] * (len(shape) - len(counts)) + counts
    offset = len(counts) - len(shape)
    sizes = {f"_r{i}": c for i, c in enumerate(counts)}
    sizes |= {f"d{i}": s for i, s in enumerate(shape)}
    result: list[tuple[str, ...]] = []
    for i, count in enumerate(counts):
        if i < offset:
            result.append((f"_r{i}",))
        else:
            own = f"d{i - offset}"
            result.append((own,) if count == 1 else (f"_r{i}", own))
    return describe(op, {"self": named(shape)}, tuple(result), sizes=sizes, linear=_SELF)


def repeat_interleave(op: OpCall) -> Rule | None:
    """x[d] -> [(d r)]: each element next to its copies. Counts that differ need d whole."""
    if op.overload not in ("self_int", "self_Tensor"):
        return None
    shape = shape_of(op, "self")
    dim = op.named("dim")
    at = {positive(int(dim), len(shape))} if dim is not None else set(range(len(shape)))
    if op.overload == "self_Tensor":
        if dim is None:
            return None
        x = with_whole(len(shape), at)
        counts: Dims = tuple(() for _ in shape_of(op, "repeats"))
        result = with_whole(len(shape), at, "_r")
        return describe(op, {"self": x, "repeats": counts}, result, linear=_SELF)
    count = int(op.named("repeats"))
    sizes = {f"d{i}": s for i, s in enumerate(shape)} | {"r": count}
    group = (*(f"d{i}" for i in sorted(at)), "r")
    dims = named(shape)
    interleaved: Dims = (
        (group,) if dim is None else tuple(group if i in at else d for i, d in enumerate(dims))
    )
    # With the size of the result as an argument, a rank would have to be told its own.
    fixed = frozenset(group) if op.named("output_size") is not None else frozenset()
    found = describe(op, {"self": dims}, interleaved, sizes=sizes, whole=["r"], linear=_SELF)
    return replace(found, fixed=fixed)


def unbind(op: OpCall) -> Rule:
    """x[..., n, ...] -> n results without that dim."""
    shape = shape_of(op, "self")
    at = positive(int(op.named("dim")), len(shape))
    dims = with_whole(len(shape), {at})
    return describe(op, {"self": dims}, (*dims[:at], *dims[at + 1 :]), linear=_SELF)


def narrow(op: OpCall) -> Rule | None:
    """x[..., n, ...] -> a range of n, which is whole."""
    if isinstance(op.named("start"), Operand):
        return None
    shape = shape_of(op, "self")
    at = {positive(int(op.named("dim")), len(shape))}
    x, result = with_whole(len(shape), at), with_whole(len(shape), at, "_r")
    return describe(op, {"self": x}, result, linear=_SELF)


def diagonal(op: OpCall) -> Rule:
    """The two dims make one at the end."""
    shape = shape_of(op, "self")
    at = {positive(int(op.named(name)), len(shape)) for name in ("dim1", "dim2")}
    dims = with_whole(len(shape), at)
    rest = tuple(d for i, d in enumerate(dims) if i not in at)
    return describe(op, {"self": dims}, (*rest, ("_diagonal",)), linear=_SELF)


def diag_embed(op: OpCall) -> Rule:
    """The last dim becomes the diagonal of two."""
    shape = shape_of(op, "self")
    rank = len(shape) + 1
    at = {positive(int(op.named(name)), rank) for name in ("dim1", "dim2")}
    rest = iter(named(shape[:-1]))
    result = tuple((f"_r{i}",) if i in at else next(rest) for i in range(rank))
    return describe(op, {"self": (*named(shape[:-1]), ("_last",))}, result, linear=_SELF)


def triangle(op: OpCall) -> Rule:
    """tril and triu of the last two dims."""
    dims = named(shape_of(op, "self"))
    linear = _SELF if op.types[0].dtype.is_floating_point else ()
    return describe(op, {"self": dims}, dims, whole=[d[0] for d in dims[-2:]], linear=linear)


def select_scatter(op: OpCall) -> Rule:
    """x with one place of a dim, which is whole, taken from `src`."""
    shape = shape_of(op, "self")
    at = positive(int(op.named("dim")), len(shape))
    x = with_whole(len(shape), {at})
    return describe(op, {"self": x, "src": (*x[:at], *x[at + 1 :])}, x, linear=[["self", "src"]])


def slice_scatter(op: OpCall) -> Rule:
    """x with a range of a dim, which is whole, taken from `src`."""
    shape = shape_of(op, "self")
    at = {positive(int(op.named("dim")), len(shape))}
    x = with_whole(len(shape), at)
    source = with_whole(len(shape), at, "_s")
    return describe(op, {"self": x, "src": source}, x, linear=[["self", "src"]])


def unfold(op: OpCall) -> Rule:
    """x[..., n, ...] -> [..., windows, ..., size]; n is whole, windows overlap."""
    shape = shape_of(op, "self")
    at = {positive(int(op.named("dimension")), len(shape))}
    result = (*with_whole(len(shape), at, "_r"), ("_size",))
    return describe(op, {"self": with_whole(len(shape), at)}, result, linear=_SELF)


def expand_as(op: OpCall) -> Rule | None:
    """The sizes of another tensor, of which nothing else is read."""
    other = shape_of(op, "other")
    dims = named(other)
    return describe(
        op, {"self": aligned(shape_of(op, "self"), other), "other": dims}, dims, linear=_SELF
    )


def as_complex(op: OpCall) -> Rule:
    """x[..., 2] -> [...]"""
    lead = named(op.result.shape)
    return describe(op, {"self": (*lead, ("_pair",))}, lead)


def as_real(op: OpCall) -> Rule:
    """x[...] -> [..., 2]"""
    dims = named(shape_of(op, "self"))
    return describe(op, {"self": dims}, (*dims, ("_pair",)))


def constant(op: OpCall) -> Rule:
    """new_zeros and its like: nothing of the operand is read but its dtype."""
    none = tuple(() for _ in shape_of(op, "self"))
    result = tuple((f"_r{i}",) for i in range(len(op.result.shape)))
    return describe(op, {"self": none}, result)


def meshgrid(op: OpCall) -> Rule | None:
    """x[n], y[m] -> [n, m] each; "xy" swaps the first two dims."""
    members = op.named("tensors")
    count = len(members)
    if len(op.types) != count or any(len(t.shape) != 1 for t in op.types):
        return None
    order = list(range(count))
    if op.named("indexing") == "xy" and count > 1:
        order[:2] = [1, 0]
    sizes = {f"d{i}": t.shape[0] for i, t in enumerate(op.types)}
    if prod(sizes.values()) != op.result.numel:
        return None
    result = tuple((f"d{i}",) for i in order)
    return Rule(tuple(((f"d{i}",),) for i in range(count)), (result,) * len(op.results), sizes)


def matrix_function(op: OpCall) -> Rule | None:
    """inverse, cholesky, determinant, matrix_exp: matrices whole, x[b*, n, n] -> [b*, ...]"""
    if len(op.types) != 1:
        return None
    shape = op.types[0].shape
    lead = named(shape[:-2])
    operand = (*lead, ("_n",), ("_m",))
    results = tuple(
        (*lead, *((f"_r{i}",) for i in range(len(t.shape) - len(lead)))) for t in op.results
    )
    name = next(n for n in ("A", "self", "input") if isinstance(op.named(n), Operand))
    return describe(op, {name: operand}, *results)
