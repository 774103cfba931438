"""The rule language: an op's operands and results named by *factors*, as in einsum.

    linear        b* k, n k -> b* n
    attention     b (g r) q e, b g k e, b g k f -> b (g r) q f
    embedding     v d, b* -> b* d

A dim is one factor or a group of factors in brackets, major factor first; `x*` stands for all dims
that are left over, `_` for a dim that can't be sharded and is shared with nothing. From a rule
alone follow every legal strategy on one mesh axis, the placement of each gradient, local shapes
and FLOPs (see `autopar.rules.strategy`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from autopar.errors import PassError
from autopar.op_call import OpCall
from autopar.placement import Placement

Dim = tuple[str, ...]
Dims = tuple[Dim, ...]
_TOKEN = re.compile(r"\(([^)]*)\)|(\S+)")


class NoRuleError(PassError):
    """A call that the rule of its op does not describe; it is replicated."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Factors of one op call.

    `whole`: factors that must not be sharded, as what they hold belongs together. `fixed`: factors
    that can't be sharded either, although their members are independent of each other (an argument
    holds their size). `linear`: sets of operands that may together be
    partial sums while the result is then one too. `additive`: operands that are added to the
    result (a bias): when a contracted factor is sharded they must be partial as well.
    `together`: pairs of factors that can be sharded over the same ranks, with the `autopar` op that
    exchanges what is missing. `local_ops`: for a factor, the `autopar` op that computes it on
    shards, and `outcomes` the placement of the results then. `divided`: for a factor, the names of
    integer arguments that a rank gets divided by the number of ranks (the groups of a convolution).
    `random`: the op draws random numbers; ranks draw their own on shards. `flops`: of the forward.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[frozenset[int], ...] = ()
    additive: frozenset[int] = frozenset()
    local_ops: Mapping[str, str] = field(default_factory=dict)
    outcomes: Mapping[str, Placement] = field(default_factory=dict)
    flops: float = 0.0
    fixed: frozenset[str] = frozenset()
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    random: bool = False
    together: Mapping[tuple[str, str], str] = field(default_factory=dict)

    def __str__(self) -> str:
        def dims(tensor: Dims) -> str:
            return " ".join(
                d[0] if len(d) == 1 else f"({' '.join(d)})" if d else "1" for d in tensor
            )

        return f"{', '.join(map(dims, self.operands))} -> {', '.join(map(dims, self.results))}"


def parse(
    text: str,
    op: OpCall,
    *,
    whole: Iterable[str] = (),
    linear: Iterable[Iterable[int]] = (),
    additive: Iterable[int] = (),
    contraction: bool = False,
    local_ops: Mapping[str, str] | None = None,
    outcomes: Mapping[str, Placement] | None = None,
    random: bool = False,
) -> Rule:
    """A rule from its text and a call. `contraction`: FLOPs are twice the product of factors.

    Raises `NoRuleError` where text and call don't agree.
    """
    operands, results = tokens_of(text)
    shapes = [t.shape for t in op.types] + [t.shape for t in op.results]
    if len(operands) != len(op.types) or len(results) != len(op.results):
        raise NoRuleError(
            f"rule {text!r} names {len(operands)} operands, {op.op_name} has {len(op.types)}",
            next_step="register a rule for this overload",
        )
    sizes: dict[str, int] = {}
    expanded = [
        _expand(t, s, sizes, i)
        for i, (t, s) in enumerate(zip(operands + results, shapes, strict=True))
    ]
    _size_groups(expanded, shapes, sizes)
    product = float(prod(sizes.values()))
    named = set(whole)
    blocked = {f for f in sizes if f in named or f.startswith("_") or _rest_of(f) in named}
    return Rule(
        tuple(expanded[: len(operands)]),
        tuple(expanded[len(operands) :]),
        sizes,
        frozenset(blocked),
        tuple(frozenset(group) for group in linear),
        frozenset(additive),
        local_ops or {},
        outcomes or {},
        2.0 * product if contraction else 0.0,
        random=random,
    )


def _rest_of(factor: str) -> str:
    """`b*`, of which `b0` is the first."""
    return factor.rstrip("0123456789") + "*"


def tokens_of(text: str) -> tuple[list[list[Dim]], list[list[Dim]]]:
    """Dims of the operands and of the results as a text names them."""
    left, right = text.split("->")
    return [_tokens(part) for part in left.split(",")], [_tokens(p) for p in right.split(",")]


def _size_groups(
    tensors: Iterable[Dims], shapes: Iterable[tuple[int, ...]], sizes: dict[str, int]
) -> None:
    """Sizes of factors that occur in groups only: what the known ones leave of the dim."""
    groups = [
        (dim, size)
        for dims, shape in zip(tensors, shapes, strict=True)
        for dim, size in zip(dims, shape, strict=True)
        if len(dim) > 1
    ]
    for dim, size in groups * 2:
        unknown = [f for f in dim if f not in sizes]
        known = prod(sizes[f] for f in dim if f in sizes)
        if len(unknown) == 1 and known and size % known == 0:
            sizes[unknown[0]] = size // known
    for dim, size in groups:
        if any(f not in sizes for f in dim) or prod(sizes[f] for f in dim) != size:
            raise NoRuleError(
                f"the sizes of the factors of ({' '.join(dim)}) don't follow from the call",
                next_step="name each factor of a group, but one, as a dim of its own somewhere",
            )


def _tokens(part: str) -> list[tuple[str, ...]]:
    return [tuple((a or b).split()) for a, b in _TOKEN.findall(part)]


def _expand(
    tokens: list[tuple[str, ...]], shape: tuple[int, ...], sizes: dict[str, int], position: int
) -> Dims:
    rest = len(shape) - sum(1 for t in tokens if not t[0].endswith("*"))
    dims: list[Dim] = []
    for token in tokens:
        if token[0].endswith("*"):
            dims += [(f"{token[0][:-1]}{i}",) for i in range(rest)]
        elif token == ("_",):
            dims.append((f"_{position}.{len(dims)}",))
        else:
            dims.append(token)
    if len(dims) != len(shape):
        raise NoRuleError(
            f"a rule names {len(dims)} dims for a tensor of shape {shape}",
            next_step="register a rule for this overload",
        )
    for dim, size in zip(dims, shape, strict=True):
        if len(dim) == 1 and sizes.setdefault(dim[0], size) != size:
            raise NoRuleError(
                f"factor {dim[0]} has sizes {sizes[dim[0]]} and {size}",
                next_step="register a rule for this overload",
            )
    return tuple(dims)
