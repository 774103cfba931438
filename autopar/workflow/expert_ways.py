"""Which ways to split a layer's experts over the tp axis there are not, and why."""

from __future__ import annotations

from collections.abc import Collection

from autopar.op_call import OpCall, Operand
from autopar.report.words import EXPERT_WORDS


def missing_ways(call: OpCall, strategies: Collection[str], tp: int) -> dict[str, str]:
    """The field's words of each way that is not legal, with the reason."""
    down = call.named("down")
    assert isinstance(down, Operand)
    count, *sides = call.types[down.index].shape
    inner = sides[0] if call.named("transposed") else sides[1]
    found = {}
    for factor in ("e", "i"):
        if f"shard {factor}" in strategies:
            continue
        size = count if factor == "e" else inner
        if size % tp:
            what = "experts" if factor == "e" else "columns of an expert"
            why = f"{size} {what} do not divide by {tp}"
        elif factor == "i":
            why = "the function between its projections needs all columns, or gate and up are one"
        else:
            why = "a tensor is read twice, or the op is marked to be replicated"
        found[EXPERT_WORDS[factor]] = why
    return found
