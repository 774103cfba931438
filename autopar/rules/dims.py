"""Rules put together from the dims of operands by their names in the op's schema."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

from autopar.op_call import OpCall, Operand
from autopar.rules.language import Dims, NoRuleError, Rule


def named(shape: Sequence[int], prefix: str = "d") -> Dims:
    """One factor for each dim: `d0 d1 d2`."""
    return tuple((f"{prefix}{i}",) for i in range(len(shape)))


def with_whole(rank: int, whole: Collection[int], prefix: str = "_") -> Dims:
    """`d0 _1 d2`: the dims `whole` by names of their own."""
    return tuple((f"{prefix}{i}",) if i in whole else (f"d{i}",) for i in range(rank))


def aligned(shape: Sequence[int], to: Sequence[int], dims: Dims | None = None) -> Dims:
    """Dims of an operand that broadcasts to `to`, right-aligned; one that grows has no factor."""
    dims = named(to) if dims is None else dims
    offset = len(to) - len(shape)
    if offset < 0:
        raise _refused(f"shape {tuple(shape)} does not broadcast to {tuple(to)}")
    return tuple(dims[i + offset] if s == to[i + offset] else () for i, s in enumerate(shape))


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape that operands broadcast to."""
    rank = max((len(s) for s in shapes), default=0)
    padded = [(1,) * (rank - len(s)) + tuple(s) for s in shapes]
    return tuple(max(sizes) if 0 not in sizes else 0 for sizes in zip(*padded, strict=True))


def shape_of(op: OpCall, name: str) -> tuple[int, ...]:
    """Shape of the tensor argument `name`; raises `NoRuleError` where it is none."""
    value = op.named(name)
    if not isinstance(value, Operand):
        raise _refused(f"{op.op_name} has no tensor {name!r}")
    return op.types[value.index].shape


def reduced_dims(op: OpCall, name: str = "dim") -> set[int]:
    """The dims an argument names, counted from 0; all of them for None, [] or no such argument."""
    rank = len(op.types[0].shape)
    dim = op.named(name)
    if dim is None or dim == [] or dim == ():
        return set(range(rank))
    return {positive(int(d), rank) for d in (dim if isinstance(dim, list | tuple) else [dim])}


def positive(dim: int, rank: int) -> int:
    """A dim counted from 0; a scalar passes for a row of one."""
    return dim % rank if rank else 0


def describe(
    op: OpCall,
    operands: Mapping[str, Dims],
    *results: Dims,
    whole: Iterable[str] = (),
    linear: Iterable[Iterable[str]] = (),
    additive: Iterable[str] = (),
    sizes: Mapping[str, int] | None = None,
    **rest: Any,
) -> Rule:
    """A rule from the dims of each tensor argument, by name. Factors that begin with `_` are whole.

    Arguments that are None are skipped; one dims for several results means that they are alike.
    `sizes` gives those of factors in groups. Raises `NoRuleError` when a tensor is left without
    dims, occurs twice, or has other sizes than its factors.
    """
    index: dict[str, int] = {}
    by_index: dict[int, Dims] = {}
    for name, dims in operands.items():
        value = op.named(name)
        if not isinstance(value, Operand):
            continue
        if by_index.setdefault(value.index, dims) != dims:
            raise _refused(f"{op.op_name} reads one tensor in two roles")
        index[name] = value.index
    if len(by_index) != len(op.types):
        raise _refused(f"{op.op_name} has operands that its rule does not name")
    if len(results) == 1:
        results *= len(op.results)
    by_position = tuple(by_index[i] for i in range(len(op.types)))
    found = measured(op, (*by_position, *results), sizes or {})
    return Rule(
        by_position,
        results,
        found,
        frozenset(whole) | {f for f in found if f.startswith("_")},
        tuple(frozenset(index[n] for n in group if n in index) for group in linear),
        frozenset(index[n] for n in additive if n in index),
        **rest,
    )


def measured(op: OpCall, tensors: Sequence[Dims], sizes: Mapping[str, int]) -> dict[str, int]:
    """Sizes of all factors, checked against the shapes of operands and results."""
    found: dict[str, int] = {}
    for dims, kind in zip(tensors, (*op.types, *op.results), strict=True):
        if len(dims) != len(kind.shape):
            raise _refused(f"{op.op_name} has a tensor of shape {kind.shape} for dims {dims}")
        for dim, size in zip(dims, kind.shape, strict=True):
            for factor in dim:
                found.setdefault(factor, sizes[factor] if len(dim) > 1 else size)
            shared = [f for f in dim if not f.startswith("_")]
            if shared and prod(found[f] for f in dim) != size:
                raise _refused(f"{op.op_name}: dim {dim} is {size}, its factors are {found}")
    return found


def free(*names: str) -> Dims:
    """`free("b", "c")`: one factor for each dim."""
    return tuple((name,) for name in names)


def _refused(message: str) -> NoRuleError:
    return NoRuleError(message, next_step="it is replicated; register a rule for this form")
