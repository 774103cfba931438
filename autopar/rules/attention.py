"""scaled_dot_product_attention: batch and heads are free, rows of queries are unless causal."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from autopar.op_call import OpCall, Operand
from autopar.rules.dims import aligned, broadcast, free, named
from autopar.rules.language import Dims, Rule
from autopar.sequence_shards import ATTENTION_ROWS


def sdpa(op: OpCall) -> Rule | None:
    """q[b*, h, q, e], k[b*, g, k, e], v[b*, g, k, f], mask -> [b*, h, q, f].

    With grouped queries h = g * r and the major factor g is shared; else leading dims broadcast.
    The mask broadcasts to [b*, h, q, k]. FLOPs: two products of 2*b*h*q*k*e; a causal mask halves
    nothing here, as torch's own counter does. With dropout it is a random op.
    """
    dropout = float(op.named("dropout_p") or 0.0)
    kept = {"q"} if dropout or op.named("is_causal") else set()
    found = attention(op, grouped=bool(op.named("enable_gqa")), whole=kept)
    return replace(found, random=dropout > 0) if found is not None else None


def attention(op: OpCall, *, grouped: bool, whole: set[str]) -> Rule | None:
    """The rule of attention whose first operands are q, k and v; `whole`: further whole factors."""
    if len({a.index for a in op.args[:3] if isinstance(a, Operand)}) != 3:
        return None
    q, k, v = (op.types[a.index].shape for a in op.args[:3])
    if len(q) < 2 or len({len(q), len(k), len(v)}) != 1 or k[-2] != v[-2]:
        return None
    grouped = grouped and len(q) >= 3 and q[-3] != k[-3]
    if grouped and (q[:-3] != k[:-3] or k[:-1] != v[:-1] or q[-3] % k[-3]):
        return None
    lead = q[:-2] if grouped else broadcast(q[:-2], k[:-2], v[:-2])
    batch = free("b") if len(q) == 4 else named(lead[:-1], "b")
    shared: Dims = (*batch, ("g",)) if len(q) > 2 else ()
    own: Dims = (*batch, ("g", "r")) if grouped else shared
    sizes = {d[0]: s for d, s in zip(shared, lead, strict=True)}
    if grouped:
        sizes |= {"g": k[-3], "r": q[-3] // k[-3]}
    sizes |= {"q": q[-2], "k": k[-2], "e": q[-1], "f": v[-1]}
    keys = shared if grouped else aligned(k[:-2], lead, shared)
    values = shared if grouped else aligned(v[:-2], lead, shared)
    queries = own if grouped else aligned(q[:-2], lead, own)
    layout: list[Dims] = [
        (*queries, ("q",), ("e",)),
        (*keys, ("k",), ("e",)),
        (*values, ("k",), ("f",)),
    ]
    by_index = {a.index: d for a, d in zip(op.args[:3], layout, strict=True)}
    mask = op.named("attn_mask")
    if isinstance(mask, Operand):
        if mask.index in by_index:
            return None
        scores = (*lead, q[-2], k[-2])
        by_index[mask.index] = aligned(op.types[mask.index].shape, scores, (*own, ("q",), ("k",)))
    operands = tuple(by_index[i] for i in range(len(op.types)))
    flops = 2.0 * prod(lead) * q[-2] * k[-2] * (q[-1] + v[-1])
    return Rule(
        operands,
        ((*own, ("q",), ("f",)),),
        sizes,
        frozenset({"k", "e", "f"} | whole),
        flops=flops,
    )


def by_rows(op: OpCall, rule: Rule) -> Rule:
    """The rule where causal attention may be split by rows of queries too, each with the keys up to
    its own: by the op `attention_rows`, which knows where in the sequence a rank's rows are."""
    square = rule.sizes["q"] == rule.sizes["k"]
    plain = not rule.random and op.named("attn_mask") is None
    if not (op.named("is_causal") and square and plain):
        return rule
    return replace(rule, whole=rule.whole - {"q"}, local_ops={"q": ATTENTION_ROWS})
