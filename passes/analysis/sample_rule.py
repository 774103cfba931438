"""Where the rule of an op says that the samples of its operands are in its result."""

from __future__ import annotations

from autopar.rules.language import Rule


def batch_dim(rule: Rule, dims: list[int | None]) -> int | None:
    """Dim of the batch in the result; -1 when it is lost from sight, None when samples mix."""
    factors = {
        operand[dim][0]
        for operand, dim in zip(rule.operands, dims, strict=True)
        if dim is not None and dim < len(operand) and operand[dim]
    }
    if len(factors) != 1:
        # Two factors: every sample of one operand meets every sample of the other.
        return None if factors else -1
    factor = factors.pop()
    if factor in rule.whole:
        return None
    for index, dim in enumerate(rule.results[0]):
        if dim and dim[0] == factor:
            return index
    return None if not any(factor in dim for dim in rule.results[0]) else -1
