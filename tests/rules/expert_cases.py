"""Random calls of a layer's experts, and what a rank computes of them, by a dense formula."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

import autopar.experts.capacity  # noqa: F401 - they register the ops
import autopar.experts.op  # noqa: F401
from autopar.experts.activation import evaluate
from autopar.op_call import OpCall, Operand
from tests.rules.draws import EVEN, SIZE, Case, Draw, grad, real
from tests.rules.execution import Call, call

HALVES = (
    "v0 = split.Tensor(x, w // 2, -1); v1 = silu.default(v0[0]); v2 = mul.Tensor(v1, v0[1]); v2"
)
PAIRS = (
    "v0 = slice.Tensor(x, 1, 0, 9223372036854775807, 2); "
    "v1 = slice.Tensor(x, 1, 1, 9223372036854775807, 2); v2 = mul.Tensor(v0, v1); v2"
)
PLAIN = "v0 = tanh.default(x); v0"
# The function, how often its width is the inner size in one operand, and whether there are two.
KINDS = ((HALVES, 1, True), (HALVES, 2, False), (PAIRS, 2, False), (PLAIN, 1, False))


def experts(draw: Draw) -> Call:
    tokens, count, inner = draw(EVEN), draw(EVEN), draw(EVEN)
    hidden, choices = draw(SIZE), draw(st.sampled_from([1, 2]))
    text, times, gated = draw(st.sampled_from(KINDS))
    transposed, biased = draw(st.booleans()), draw(st.booleans())
    width = times * inner

    def matrix(outer: int, into: int) -> torch.Tensor:
        return real(count, *((into, outer) if transposed else (outer, into)), grad=grad(draw))

    index = torch.stack([torch.randperm(count)[:choices] for _ in range(tokens)])
    return call(
        torch.ops.autopar.experts.default,
        real(tokens, hidden),
        index,
        real(tokens, choices, grad=grad(draw)),
        matrix(width, hidden),
        matrix(hidden, inner),
        matrix(width, hidden) if gated else None,
        real(count, width) if biased else None,
        real(count, width) if biased and gated else None,
        real(count, hidden) if biased else None,
        count,
        0,
        1,
        transposed,
        text,
    )


def own_experts(op: OpCall, per_rank: list[list[torch.Tensor]], rank: int) -> torch.Tensor:
    """Every expert of a rank on every token, and the choices that are not its own weighed zero."""
    given = [per_rank[rank][a.index] if isinstance(a, Operand) else a for a in op.args]
    hidden, index, weights, up, down, gate, up_bias, gate_bias, down_bias, *rest = given
    transposed, text = rest[-2:]
    result = torch.zeros_like(hidden)
    for place in range(up.shape[0]):
        here = rank * up.shape[0] + place
        parts = []
        for matrix, bias in ((gate, gate_bias), (up, up_bias)):
            if matrix is not None:
                part = hidden @ (matrix[place] if transposed else matrix[place].T)
                parts.append(part + bias[place] if bias is not None else part)
        made = evaluate(text, parts) @ (down[place] if transposed else down[place].T)
        made = made + down_bias[place] if down_bias is not None else made
        result = result + made * (weights * (index == here)).sum(1, keepdim=True)
    return result


def within_capacity(draw: Draw) -> Call:
    """So much room that nothing is dropped: what is depends on the tokens of a rank."""
    tokens, count = draw(EVEN), draw(SIZE)
    index = torch.randint(0, count, (tokens, draw(st.sampled_from([1, 2]))))
    target = torch.ops.autopar.within_capacity.default
    return call(target, index, torch.rand(index.shape), count, float(count))


EXPERTS: dict[str, Case] = {"experts": experts, "within_capacity": within_capacity}
