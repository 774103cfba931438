"""Sharding rule of a layer's experts (`autopar::experts`).

t   tokens: every rank has all experts and computes its own tokens
e   experts: every rank has all tokens and computes what its experts add to the result
i   inner size: every rank has a slice of every expert; what it makes is a term of the result
t,e both: rows travel to the ranks of their experts and back

Where ep has split the experts of a layer already (`exchanged_experts`), those that are here are not
split again: of these ways t and i are left.
"""

from __future__ import annotations

from math import prod

from autopar.experts import EXCHANGED
from autopar.experts.activation import is_columnwise
from autopar.op_call import OpCall, Operand
from autopar.rules.language import Dims, Rule

# Names of the tensor operands in the order of the call.
_TENSORS = (
    "hidden", "index", "weights", "up", "down", "gate", "up_bias", "gate_bias", "down_bias",
)  # fmt: skip


def experts(op: OpCall) -> Rule | None:
    """hidden[t, h], index[t, k], weights[t, k], up[e, i, h], down[e, h, i] ... -> [t, h]"""
    given = {n: a.index for n, a in zip(_TENSORS, op.args, strict=False) if isinstance(a, Operand)}
    split = op.op_name == EXCHANGED
    if len(set(given.values())) != len(given) or (not split and int(op.named("first"))):
        return None  # the same tensor twice, or only a part of the experts
    transposed = bool(op.named("transposed"))
    count, *sides = op.types[given["down"]].shape
    hidden, inner = reversed(sides) if transposed else sides
    width = op.types[given["up"]].shape[2 if transposed else 1]
    columns = ("i",) if width == inner else ("i", "j")
    parts = 2 if "gate" in given else 1

    def matrix(outer: tuple[str, ...]) -> Dims:
        return (("e",), ("h",), outer) if transposed else (("e",), outer, ("h",))

    down: Dims = (("e",), ("i",), ("h",)) if transposed else (("e",), ("h",), ("i",))
    dims: dict[str, Dims] = {
        "hidden": (("t",), ("h",)),
        "index": (("t",), ("k",)),
        "weights": (("t",), ("k",)),
        "up": matrix(columns),
        "gate": matrix(columns),
        "down": down,
        "up_bias": (("e",), columns),
        "gate_bias": (("e",), columns),
        "down_bias": (("e",), ("h",)),
    }
    operands = tuple(dims[n] for n in sorted(given, key=lambda n: given[n]))
    tokens, choices = op.types[given["index"]].shape
    sizes = {"t": tokens, "e": count, "i": inner, "h": hidden, "k": choices}
    if width != inner:
        sizes["j"] = width // inner
    whole = ({"h", "k", "j"} & set(sizes)) | ({"e"} if split else set())
    if not is_columnwise(str(op.named("activation")), parts):
        whole.add("i")
    products = prod((tokens, choices, hidden)) * (parts * width + inner)
    return Rule(
        operands,
        ((("t",), ("h",)),),
        sizes,
        frozenset(whole),
        additive=frozenset({given["down_bias"]} if "down_bias" in given else ()),
        local_ops={} if split else {"e": "own_experts"},
        together={} if split else {("t", "e"): EXCHANGED},
        flops=2.0 * products * _share_here(op, count),
    )


def within_capacity(op: OpCall) -> Rule | None:
    """index[t, k], weights[t, k] -> [t, k]; the limit is for the tokens that a rank has."""
    tokens, choices = op.types[0].shape
    dims: Dims = (("t",), ("k",))
    return Rule((dims, dims), (dims,), {"t": tokens, "k": choices}, frozenset({"k"}))


def _share_here(op: OpCall, count: int) -> float:
    """Rows that the experts among the operands get when they are even, per row of these tokens."""
    ranks = int(op.named("ranks")) if op.op_name == EXCHANGED else 1
    return ranks * count / int(op.named("experts"))
