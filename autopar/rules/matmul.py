"""Matrix products. A contracted factor that is sharded makes the result a partial sum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from autopar.op_call import OpCall
from autopar.rules.dims import aligned, free, measured, named
from autopar.rules.language import Dims, Rule, parse


def linear(op: OpCall) -> Rule:
    """x[..., k], weight[n, k], bias[n] -> [..., n]"""
    if len(op.types) == 3:
        return parse(
            "b* k, n k, n -> b* n", op, linear=[{0, 2}, {1, 2}], additive=[2], contraction=True
        )
    return parse("b* k, n k -> b* n", op, linear=[{0}, {1}], contraction=True)


def mm(op: OpCall) -> Rule:
    """a[m, k], b[k, n] -> [m, n]"""
    return parse("m k, k n -> m n", op, linear=[{0}, {1}], contraction=True)


def addmm(op: OpCall) -> Rule | None:
    """beta * c + alpha * a[m, k] @ b[k, n], c broadcast to [m, n]."""
    if len(op.types) != 3:
        return None
    return _added(op, ("m", "k"), ("k", "n"), ("m", "n"))


def bmm(op: OpCall) -> Rule:
    """a[b, m, k], b[b, k, n] -> [b, m, n]"""
    return parse("b m k, b k n -> b m n", op, linear=[{0}, {1}], contraction=True)


def baddbmm(op: OpCall) -> Rule | None:
    """beta * c + alpha * a[b, m, k] @ b[b, k, n], c broadcast to [b, m, n]."""
    if len(op.types) != 3:
        return None
    return _added(op, ("b", "m", "k"), ("b", "k", "n"), ("b", "m", "n"))


def addbmm(op: OpCall) -> Rule | None:
    """beta * c + alpha * the sum over b of a[b, m, k] @ b[b, k, n], c broadcast to [m, n]."""
    if len(op.types) != 3:
        return None
    return _added(op, ("b", "m", "k"), ("b", "k", "n"), ("m", "n"))


def addmv(op: OpCall) -> Rule | None:
    """beta * c + alpha * a[m, k] @ x[k], c broadcast to [m]."""
    if len(op.types) != 3:
        return None
    return _added(op, ("m", "k"), ("k",), ("m",))


def addr(op: OpCall) -> Rule | None:
    """beta * c + alpha * x[m] y[n], c broadcast to [m, n]; a product of elements counts nothing."""
    if len(op.types) != 3:
        return None
    return replace(_added(op, ("m",), ("n",), ("m", "n")), flops=0.0)


def _added(op: OpCall, a: tuple[str, ...], b: tuple[str, ...], out: tuple[str, ...]) -> Rule:
    """An addend and a product. The scales are the same on every rank, so a sharded contracted
    factor gives terms of the sum whatever they are."""
    sizes = dict(zip(out, op.result.shape, strict=True))
    sizes |= dict(zip(a, op.types[1].shape, strict=True))
    sizes |= dict(zip(b, op.types[2].shape, strict=True))
    addend = aligned(op.types[0].shape, op.result.shape, free(*out))
    return Rule(
        (addend, free(*a), free(*b)),
        (free(*out),),
        sizes,
        linear=(frozenset({0, 1}), frozenset({0, 2})),
        additive=frozenset({0}),
        flops=2.0 * prod(sizes.values()),
    )


def matmul(op: OpCall) -> Rule | None:
    """a[..., m, k] @ b[..., k, n] with batch dims that broadcast; vectors lack m or n."""
    if len(op.types) != 2:
        return None
    a, b, out = op.types[0].shape, op.types[1].shape, op.result.shape
    rows: tuple[str, ...] = ("m",) if len(a) > 1 else ()
    columns: tuple[str, ...] = ("n",) if len(b) > 1 else ()
    lead = out[: len(out) - len(rows) - len(columns)]
    batch = named(lead, "b")
    left = aligned(a[: len(a) - len(rows) - 1], lead, batch) + free(*rows, "k")
    right = aligned(b[: len(b) - len(columns) - 1], lead, batch) + free("k", *columns)
    operands, result = (left, right), (*batch, *free(*rows, *columns))
    sizes = measured(op, (*operands, result), {})
    flops = 2.0 * prod(sizes.values())
    return Rule(operands, (result,), sizes, linear=(frozenset({0}), frozenset({1})), flops=flops)


def dot(op: OpCall) -> Rule:
    """x[k] . y[k]"""
    return parse("k, k ->", op, linear=[{0}, {1}], contraction=True)


def mv(op: OpCall) -> Rule:
    """a[m, k] @ x[k] -> [m]"""
    return parse("m k, k -> m", op, linear=[{0}, {1}], contraction=True)


def outer(op: OpCall) -> Rule:
    """x[m], y[n] -> [m, n]"""
    return parse("m, n -> m n", op, linear=[{0}, {1}])


def inner(op: OpCall) -> Rule | None:
    """a[..., k], b[..., k] -> [..., ...]"""
    if len(op.types) != 2 or any(not t.shape for t in op.types):
        return None
    a, b = (t.shape for t in op.types)
    return _contracted(op, [len(a) - 1], [len(b) - 1])


def tensordot(op: OpCall) -> Rule | None:
    """Contracts pairs of dims; what is left of both operands follows in order."""
    if len(op.types) != 2:
        return None
    return _contracted(op, op.named("dims_self"), op.named("dims_other"))


def _contracted(op: OpCall, of_a: Sequence[int], of_b: Sequence[int]) -> Rule:
    def dims(rank: int, contracted: Sequence[int], rest: str) -> Dims:
        names = {int(d) % rank: f"k{i}" for i, d in enumerate(contracted)}
        return tuple((names.get(i, f"{rest}{i}"),) for i in range(rank))

    left = dims(len(op.types[0].shape), of_a, "m")
    right = dims(len(op.types[1].shape), of_b, "n")
    result = tuple(d for d in left + right if not d[0].startswith("k"))
    sizes = measured(op, (left, right, result), {})
    linear = (frozenset({0}), frozenset({1}))
    return Rule((left, right), (result,), sizes, linear=linear, flops=2.0 * prod(sizes.values()))


def bilinear(op: OpCall) -> Rule | None:
    """x[..., i], y[..., j], weight[o, i, j], bias[o] -> [..., o]"""
    if len(op.types) == 4:
        return parse(
            "b* i, b* j, o i j, o -> b* o",
            op,
            linear=[{0, 3}, {1, 3}, {2, 3}],
            additive=[3],
        )
    return parse("b* i, b* j, o i j -> b* o", op, linear=[{0}, {1}, {2}])
