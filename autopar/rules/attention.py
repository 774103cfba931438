"""scaled_dot_product_attention: batch and heads are free, rows of queries are unless causal."""

from __future__ import annotations

from autopar.op_call import OpCall, Operand
from autopar.rules.language import Dims, Rule


def sdpa(op: OpCall) -> Rule | None:
    """q[b, h, q, e], k[b, g, k, e], v[b, g, k, f], mask broadcast to [b, h, q, k] -> [b, h, q, f].

    With grouped queries h = g * r and the major factor g is shared. FLOPs: two products of
    2*b*h*q*k*e; a causal mask halves nothing here, as torch's own counter does.
    """
    if len({a.index for a in op.args[:3] if isinstance(a, Operand)}) != 3:
        return None
    q, k, v = (op.types[a.index].shape for a in op.args[:3])
    if len(q) != 4 or len(k) != 4 or k[0] != q[0] or v[:3] != k[:3] or q[1] % k[1]:
        return None  # broadcast operands
    mask = op.argument(3, "attn_mask")
    causal = bool(op.argument(5, "is_causal", False))
    dropout = float(op.argument(4, "dropout_p", 0.0) or 0.0)
    heads: tuple[str, ...] = ("g",) if q[1] == k[1] else ("g", "r")
    sizes = {"b": q[0], "g": k[1], "q": q[2], "k": k[2], "e": q[3], "f": v[3]}
    if len(heads) == 2:
        sizes["r"] = q[1] // k[1]
    by_index: dict[int, Dims] = {}
    layout: list[Dims] = [
        (("b",), heads, ("q",), ("e",)),
        (("b",), ("g",), ("k",), ("e",)),
        (("b",), ("g",), ("k",), ("f",)),
    ]
    for argument, dims in zip(op.args[:3], layout, strict=True):
        by_index[argument.index] = dims
    if isinstance(mask, Operand):
        by_index[mask.index] = _mask(op.types[mask.index].shape, q, heads)
    whole = {"k", "e", "f"} | ({"q"} if causal or dropout else set())
    operands = tuple(by_index[i] for i in range(len(op.types)))
    flops = 2.0 * q[0] * q[1] * q[2] * k[2] * (q[3] + v[3])
    return Rule(operands, ((("b",), heads, ("q",), ("f",)),), sizes, frozenset(whole), flops=flops)


def _mask(shape: tuple[int, ...], q: tuple[int, ...], heads: tuple[str, ...]) -> Dims:
    full: list[tuple[str, ...]] = [("b",), heads, ("q",), ("k",)]
    aligned = full[4 - len(shape) :]
    sizes = [q[0], q[1], q[2], 0][4 - len(shape) :]
    return tuple(
        d if s != 1 and (s == n or n == 0) else ()
        for d, s, n in zip(aligned, shape, sizes, strict=True)
    )
