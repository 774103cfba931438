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

    `whole`: factors that must not be sharded. `linear`: sets of operands that may together be
    partial sums while the result is then one too. `additive`: operands that are added to the
    result (a bias): when a contracted factor is sharded they must be partial as well.
    `local_ops`: for a factor, the `autopar` op that computes it on shards, and `outcomes` the
    placement of the results then. `flops`: of the forward.
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
    group_sizes: Mapping[str, int] | None = None,
) -> Rule:
    """A rule from its text and a call. `contraction`: FLOPs are twice the product of factors."""
    left, right = text.split("->")
    operands = [_tokens(part) for part in left.split(",")]
    results = [_tokens(part) for part in right.split(",")]
    shapes = [t.shape for t in op.types] + [t.shape for t in op.results]
    if len(operands) != len(op.types) or len(results) != len(op.results):
        raise NoRuleError(
            f"rule {text!r} names {len(operands)} operands, {op.op_name} has {len(op.types)}",
            next_step="register a rule for this overload",
        )
    sizes: dict[str, int] = dict(group_sizes or {})
    expanded = [
        _expand(t, s, sizes, i)
        for i, (t, s) in enumerate(zip(operands + results, shapes, strict=True))
    ]
    product = 1.0
    for size in sizes.values():
        product *= size
    blocked = set(whole) | {f for f in sizes if f.startswith("_")}
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
