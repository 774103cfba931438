"""Reading and writing at indices: what the indices point into is whole, the rest is free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autopar.op_call import OpCall, Operand
from autopar.rules.dims import (
    aligned,
    broadcast,
    describe,
    measured,
    named,
    positive,
    shape_of,
    with_whole,
)
from autopar.rules.language import Dims, NoRuleError, Rule


def gather(op: OpCall) -> Rule:
    """x[..., v], index[..., j] -> [..., j]; v is whole, every j by itself."""
    shape, index = shape_of(op, "self"), shape_of(op, "index")
    at = positive(int(op.named("dim")), len(shape))
    if not shape or not index:
        raise _refused(op)
    x = _shared(shape, index, at, "_v")
    return describe(op, {"self": x, "index": _with(x, at, "j")}, _with(x, at, "j"))


def take_along_dim(op: OpCall) -> Rule | None:
    """Like gather, with operands that broadcast in the other dims."""
    if op.named("dim") is None:
        return None
    shape, index, result = shape_of(op, "self"), shape_of(op, "indices"), op.result.shape
    at = positive(int(op.named("dim")), len(shape))
    x = _with(aligned(shape, (*result[:at], shape[at], *result[at + 1 :])), at, "_v")
    j = _with(aligned(index, result), at, "j")
    return describe(op, {"self": x, "indices": j}, _with(named(result), at, "j"))


def scatter(op: OpCall) -> Rule:
    """x[..., v], index[..., j], src[..., j] -> [..., v]; v and j are whole."""
    shape, index = shape_of(op, "self"), shape_of(op, "index")
    at = positive(int(op.named("dim")), len(shape))
    operands = {"index": index}
    if isinstance(op.named("src"), Operand):
        operands["src"] = shape_of(op, "src")
    if not shape or any(len(s) != len(shape) for s in operands.values()):
        raise _refused(op)
    equal = {
        i for i in range(len(shape)) if i != at and all(s[i] == shape[i] for s in operands.values())
    }
    whole = set(range(len(shape))) - equal
    dims = {name: with_whole(len(shape), whole, f"_{name}") for name in operands}
    x = with_whole(len(shape), whole, "_x")
    sums = op.op_name.startswith("scatter_add") and _floating(op)
    return describe(op, {"self": x, **dims}, x, linear=[["self", "src"]] if sums else [])


def index_select(op: OpCall) -> Rule:
    """x[..., v, ...], index[n] -> [..., n, ...]"""
    shape, index = shape_of(op, "self"), shape_of(op, "index")
    if not shape:
        raise _refused(op)
    at = positive(int(op.named("dim")), len(shape))
    x = with_whole(len(shape), {at})
    picked: Dims = (("n",),) if index else ()
    result = (*x[:at], picked[0] if index else (), *x[at + 1 :])
    return describe(op, {"self": x, "index": picked}, result, linear=[["self"]])


def index_write(op: OpCall) -> Rule:
    """index_add, index_copy, index_fill: x[..., v, ...], index[n], source[..., n, ...]"""
    shape = shape_of(op, "self")
    if not shape:
        raise _refused(op)
    at = positive(int(op.named("dim")), len(shape))
    x = with_whole(len(shape), {at})
    operands: dict[str, Dims] = {"self": x, "index": tuple(("_n",) for _ in shape_of(op, "index"))}
    if isinstance(op.named("source"), Operand):
        operands["source"] = with_whole(len(shape), {at}, "_s")
    if isinstance(op.named("value"), Operand):
        operands["value"] = ()
    linear = [["self", "source"]] if op.op_name.startswith("index_add") and _floating(op) else []
    return describe(op, operands, x, linear=linear)


def index(op: OpCall) -> Rule | None:
    """x[i, :, j]: integer indices that broadcast; their dims take the place of the indexed ones.

    Where the indexed dims are no neighbours the dims of the indices come first, as in numpy.
    """
    found = _indexed(op)
    if found is None:
        return None
    at, spread, indices = found
    shape = shape_of(op, "self")
    if _index_of(op, "self") in indices:
        return None
    x = with_whole(len(shape), set(at))
    lead = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    kept = [d for i, d in enumerate(x) if i not in at]
    result = (*kept[:lead], *named(spread, "n"), *kept[lead:])
    dims = {i: aligned(op.types[i].shape, spread, named(spread, "n")) for i in indices}
    return _by_index(op, {_index_of(op, "self"): x, **dims}, result, linear=[["self"]])


def index_put(op: OpCall) -> Rule | None:
    """x[i, :, j] = values: what the indices range over is whole, the other dims are free."""
    found = _indexed(op)
    if found is None:
        return None
    at, spread, indices = found
    shape = shape_of(op, "self")
    if len({_index_of(op, "self"), _index_of(op, "values"), *indices}) != 2 + len(set(indices)):
        return None
    x = with_whole(len(shape), set(at))
    lead = at[0] if at == list(range(at[0], at[0] + len(at))) else 0
    kept = [i for i in range(len(shape)) if i not in at]
    full = [shape[i] for i in kept[:lead]] + spread + [shape[i] for i in kept[lead:]]
    places = tuple((f"_n{i}",) for i in range(len(spread)))
    full_dims = (*(x[i] for i in kept[:lead]), *places, *(x[i] for i in kept[lead:]))
    dims = {i: aligned(op.types[i].shape, spread, places) for i in indices}
    values = aligned(shape_of(op, "values"), full, full_dims)
    roles = {_index_of(op, "self"): x, **dims, _index_of(op, "values"): values}
    linear = [["self", "values"]] if _floating(op) else []
    return _by_index(op, roles, x, linear=linear)


def masked_scatter(op: OpCall) -> Rule:
    """Takes from `source` in order, through the whole mask: nothing can be cut."""
    shape = shape_of(op, "self")
    operands = {n: tuple((f"_{n}{i}",) for i in range(len(shape_of(op, n)))) for n in _MASKED}
    return describe(op, operands, tuple((f"_r{i}",) for i in range(len(shape))))


_MASKED = ("self", "mask", "source")


def one_hot(op: OpCall) -> Rule:
    """ids[...] -> [..., classes]; without a number of classes all ids are looked at."""
    ids = named(shape_of(op, "self"))
    whole = [d[0] for d in ids] if int(op.named("num_classes")) < 0 else []
    return describe(op, {"self": ids}, (*ids, ("_classes",)), whole=whole)


def _indexed(op: OpCall) -> tuple[list[int], list[int], list[int]] | None:
    """Dims that are indexed, shape of the broadcast indices, operands that are indices."""
    at: list[int] = []
    operands: list[int] = []
    for position, value in enumerate(op.named("indices")):
        if value is None:
            continue
        if not isinstance(value, Operand) or op.types[value.index].dtype in _MASKS:
            return None
        at.append(position)
        operands.append(value.index)
    if not at:
        return None
    spread = list(broadcast(*(op.types[i].shape for i in operands)))
    return at, spread, operands


_MASKS = (torch.bool, torch.uint8)


def _by_index(
    op: OpCall, roles: dict[int, Dims], result: Dims, linear: list[list[str]]
) -> Rule | None:
    """`describe` for operands inside lists."""
    if set(roles) != set(range(len(op.types))):
        return None
    operands = tuple(roles[i] for i in range(len(op.types)))
    sizes = measured(op, (*operands, result), {})
    found = Rule(operands, (result,), sizes, frozenset(f for f in sizes if f.startswith("_")))
    groups = tuple(frozenset(_index_of(op, name) for name in group) for group in linear)
    return replace(found, linear=groups)


def _index_of(op: OpCall, name: str) -> int:
    value: Any = op.named(name)
    if not isinstance(value, Operand):
        raise _refused(op)
    return value.index


def _shared(shape: tuple[int, ...], index: tuple[int, ...], at: int, name: str) -> Dims:
    """Dims of x: shared with the index where sizes agree; elsewhere the index cuts x short."""
    whole = {i for i, (s, n) in enumerate(zip(shape, index, strict=True)) if i != at and s != n}
    return _with(with_whole(len(shape), whole), at, name)


def _with(dims: Dims, at: int, name: str) -> Dims:
    return (*dims[:at], (name,), *dims[at + 1 :])


def _floating(op: OpCall) -> bool:
    return op.result.dtype.is_floating_point


def _refused(op: OpCall) -> NoRuleError:
    return NoRuleError(f"{op.op_name} of a scalar or of other shapes", next_step="it is replicated")
