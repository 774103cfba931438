"""Ops that only rearrange: view, transpose, expand, slice, cat, split, pad. All are linear."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from autopar.op_call import OpCall
from autopar.rules.language import Dims, Rule

_ALL = (frozenset({0}),)


def _named(shape: tuple[int, ...]) -> tuple[Dims, dict[str, int]]:
    return tuple((f"d{i}",) for i in range(len(shape))), {f"d{i}": s for i, s in enumerate(shape)}


def view(op: OpCall) -> Rule | None:
    """Split and merged dims share factors; only the major factor of a merged dim can be sharded.

    (h d) -> h, d: sharding h slices both; d can't be sharded. A view as another dtype has no rule.
    """
    if op.overload == "dtype":
        return None
    operand, result, sizes, whole = common_factors(op.types[0].shape, op.result.shape)
    return Rule((operand,), (result,), sizes, frozenset(whole), _ALL)


def flatten(op: OpCall) -> Rule:
    """Like view; its arguments are dims, not sizes."""
    operand, result, sizes, whole = common_factors(op.types[0].shape, op.result.shape)
    return Rule((operand,), (result,), sizes, frozenset(whole), _ALL)


def common_factors(
    before: tuple[int, ...], after: tuple[int, ...]
) -> tuple[Dims, Dims, dict[str, int], set[str]]:
    """Refine two shapes of equal size into shared factors; what can't be refined is `whole`."""
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    left: list[list[str]] = [[] for _ in before]
    right: list[list[str]] = [[] for _ in after]
    i = j = 0
    rest_i = before[0] if before else 1
    rest_j = after[0] if after else 1
    while i < len(before) and j < len(after):
        if rest_i == 1:
            i += 1
            rest_i = before[i] if i < len(before) else 1
            continue
        if rest_j == 1:
            j += 1
            rest_j = after[j] if j < len(after) else 1
            continue
        name = f"f{len(sizes)}"
        small, large = min(rest_i, rest_j), max(rest_i, rest_j)
        left[i].append(name)
        right[j].append(name)
        if small and large % small == 0:
            # Row-major order takes dims from the left, so the shared factor is the major part of
            # what is left of both: the smaller one.
            sizes[name] = small
            rest_i, rest_j = rest_i // small, rest_j // small
        else:
            sizes[name] = small or 1
            whole.add(name)
            i, j = _skip_group(before, after, i, j, rest_i, rest_j)
            rest_i = before[i] if i < len(before) else 1
            rest_j = after[j] if j < len(after) else 1
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, whole


def _skip_group(
    before: Sequence[int], after: Sequence[int], i: int, j: int, left: int, right: int
) -> tuple[int, int]:
    """Advance both sides until their products meet again."""
    while left != right:
        if left < right:
            i += 1
            left *= before[i]
        else:
            j += 1
            right *= after[j]
    return i + 1, j + 1


def expand(op: OpCall) -> Rule:
    """A dim of size 1 that grows has a factor in the result only."""
    source, shape = op.types[0].shape, op.result.shape
    offset = len(shape) - len(source)
    dims, sizes = _named(shape)
    operand = tuple(
        dims[i + offset] if s == shape[i + offset] else () for i, s in enumerate(source)
    )
    return Rule((operand,), (dims,), sizes, linear=_ALL)


def as_another(op: OpCall) -> Rule | None:
    """view_as and reshape_as: the sizes of another tensor, of which nothing else is read."""
    if len(op.types) != 2:
        return None
    operand, result, sizes, whole = common_factors(op.types[0].shape, op.result.shape)
    return Rule((operand, result), (result,), sizes, frozenset(whole), _ALL)


def transpose(op: OpCall) -> Rule:
    dims, sizes = _named(op.types[0].shape)
    order = list(range(len(dims)))
    name = op.op_name.rstrip("_")
    if name == "permute":
        order = [int(a) % len(dims) for a in op.argument(1, "dims")]
    elif name in ("t", "numpy_T"):
        order.reverse()
    elif name in ("movedim", "moveaxis"):
        order = _moved(op, len(dims))
    else:
        # mT, adjoint and matrix_H name no dims: they swap the last two.
        given = (op.argument(1, "dim0", -2), op.argument(2, "dim1", -1))
        if order:
            a, b = (int(d) % len(dims) for d in given)
            order[a], order[b] = order[b], order[a]
    return Rule((dims,), (tuple(dims[i] for i in order),), sizes, linear=_ALL)


def _moved(op: OpCall, rank: int) -> list[int]:
    """Where each dim of the result comes from."""
    source, destination = op.argument(1, "source"), op.argument(2, "destination")
    if isinstance(source, int):
        source, destination = [source], [destination]
    target = {int(d) % rank: int(s) % rank for s, d in zip(source, destination, strict=True)}
    rest = iter([i for i in range(rank) if i not in target.values()])
    return [target[i] if i in target else next(rest) for i in range(rank)]


def unsqueeze(op: OpCall) -> Rule:
    dims, sizes = _named(op.types[0].shape)
    at = int(op.argument(1, "dim")) % (len(dims) + 1)
    return Rule((dims,), ((*dims[:at], (), *dims[at:]),), sizes, linear=_ALL)


def squeeze(op: OpCall) -> Rule:
    """Dims that it drops only when their size is 1 stay whole: a slice of size 1 would vanish."""
    dims, sizes = _named(op.types[0].shape)
    dim = op.argument(1, "dim")
    shape = op.types[0].shape
    if dim is None:
        looked_at = set(range(len(shape)))
    else:
        asked = dim if isinstance(dim, list | tuple) else [dim]
        looked_at = {int(d) % len(dims) for d in asked}
    kept = tuple(d for i, d in enumerate(dims) if i not in looked_at or shape[i] != 1)
    whole = frozenset(f"d{i}" for i in looked_at)
    return Rule((dims,), (kept,), sizes, whole, _ALL)


def _one_dim_whole(op: OpCall, dim: int) -> Rule:
    """All dims pass through but `dim`, which every operand must hold whole."""
    rank = len(op.types[0].shape)
    dim %= rank

    # Results share one name for it even where their sizes differ: it is never sharded.
    names = [f"_{p}" for p in range(len(op.types))] + ["_out"] * len(op.results)

    def dims(name: str) -> Dims:
        return tuple((name,) if i == dim else (f"d{i}",) for i in range(rank))

    sizes = {f"d{i}": s for i, s in enumerate(op.types[0].shape) if i != dim}
    tensors = [*op.types, *op.results]
    sizes |= {name: t.shape[dim] for name, t in zip(names, tensors, strict=True)}
    count = len(op.types)
    return Rule(
        tuple(dims(n) for n in names[:count]),
        tuple(dims(n) for n in names[count:]),
        sizes,
        frozenset(names),
        (frozenset(range(count)),),
    )


def slice_(op: OpCall) -> Rule:
    return _one_dim_whole(op, int(op.argument(1, "dim", 0)))


def split(op: OpCall) -> Rule:
    return _one_dim_whole(op, int(op.argument(2, "dim", 0)))


def cat(op: OpCall) -> Rule | None:
    """All operands must have the rank of the result (no legacy empty tensors)."""
    if any(len(t.shape) != len(op.result.shape) for t in op.types):
        return None
    return _one_dim_whole(op, int(op.argument(1, "dim", 0)))


def select(op: OpCall) -> Rule:
    dims, sizes = _named(op.types[0].shape)
    at = int(op.argument(1, "dim")) % len(dims)
    kept = tuple(d for i, d in enumerate(dims) if i != at)
    return Rule((dims,), (kept,), sizes, frozenset({f"d{at}"}), _ALL)


def stack(op: OpCall) -> Rule:
    dims, sizes = _named(op.types[0].shape)
    at = int(op.argument(1, "dim", 0)) % (len(dims) + 1)
    result: Dims = (*dims[:at], (), *dims[at:])
    return Rule(
        (dims,) * len(op.types), (result,), sizes, linear=(frozenset(range(len(op.types))),)
    )


def pad(op: OpCall) -> Rule:
    """Padded dims must be whole; padding with anything but zero is no linear map."""
    amounts = [int(a) for a in op.argument(1, "pad")]
    rank = len(op.types[0].shape)
    padded = {rank - 1 - k // 2 for k, a in enumerate(amounts) if a}
    dims: Dims = tuple((f"d{i}",) if i not in padded else (f"_{i}",) for i in range(rank))
    out: Dims = tuple((f"d{i}",) if i not in padded else (f"_r{i}",) for i in range(rank))
    sizes = {d[0]: s for d, s in zip(dims, op.types[0].shape, strict=True)}
    sizes |= {d[0]: s for d, s in zip(out, op.result.shape, strict=True)}
    zero = not op.argument(3, "value") and op.argument(2, "mode", "constant") == "constant"
    whole = frozenset(f for f in sizes if f.startswith("_"))
    return Rule((dims,), (out,), sizes, whole, _ALL if zero else ())


def getitem(op: OpCall) -> Rule | None:
    """One result of an op with several: same dims."""
    if op.target is not operator.getitem:
        return None
    dims, sizes = _named(op.types[0].shape)
    return Rule((dims,), (dims,), sizes, linear=_ALL)
