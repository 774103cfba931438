"""Matrix products. A contracted factor that is sharded makes the result a partial sum."""

from __future__ import annotations

from autopar.op_call import OpCall
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
    """bias[n], a[m, k], b[k, n] -> [m, n]; only with beta = alpha = 1."""
    if any(op.kwargs.get(k, 1) != 1 for k in ("beta", "alpha")) or len(op.types[0].shape) != 1:
        return None
    return parse("n, m k, k n -> m n", op, linear=[{0, 1}, {0, 2}], additive=[0], contraction=True)


def bmm(op: OpCall) -> Rule:
    """a[b, m, k], b[b, k, n] -> [b, m, n]"""
    return parse("b m k, b k n -> b m n", op, linear=[{0}, {1}], contraction=True)


def baddbmm(op: OpCall) -> Rule | None:
    """beta * c + alpha * a[b, m, k] @ b[b, k, n], c broadcast to [b, m, n].

    The scales are the same on every rank, so a sharded k gives terms of the sum whatever they are.
    """
    if len(op.types) != 3 or len(op.types[0].shape) != 3:
        return None
    out = op.result.shape
    names = ("b", "m", "n")
    addend: Dims = tuple(
        (name,) if size == whole else ()
        for name, size, whole in zip(names, op.types[0].shape, out, strict=True)
    )
    sizes = {"b": out[0], "m": out[1], "k": op.types[1].shape[2], "n": out[2]}
    return Rule(
        (addend, (("b",), ("m",), ("k",)), (("b",), ("k",), ("n",))),
        ((("b",), ("m",), ("n",)),),
        sizes,
        linear=(frozenset({0, 1}), frozenset({0, 2})),
        additive=frozenset({0}),
        flops=2.0 * sizes["b"] * sizes["m"] * sizes["k"] * sizes["n"],
    )


def matmul(op: OpCall) -> Rule | None:
    """a[..., m, k] @ b[..., k, n] with broadcast batch dims; vectors are left to the fallback."""
    if len(op.types) != 2:
        return None
    a, b = op.types[0].shape, op.types[1].shape
    if len(a) < 2 or len(b) < 2:
        return None
    out = op.result.shape
    batch = len(out) - 2
    sizes = {f"b{i}": out[i] for i in range(batch)} | {"m": a[-2], "k": a[-1], "n": b[-1]}

    def dims(shape: tuple[int, ...], last: tuple[str, str]) -> Dims:
        offset = batch - (len(shape) - 2)
        lead = tuple(
            (f"b{i + offset}",) if shape[i] == out[i + offset] else ()
            for i in range(len(shape) - 2)
        )
        return (*lead, (last[0],), (last[1],))

    flops = 2.0
    for size in sizes.values():
        flops *= size
    return Rule(
        (dims(a, ("m", "k")), dims(b, ("k", "n"))),
        ((*((f"b{i}",) for i in range(batch)), ("m",), ("n",)),),
        sizes,
        linear=(frozenset({0}), frozenset({1})),
        flops=flops,
    )
