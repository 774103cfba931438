"""Ops that take the place of torch's where a rank holds a part of every sequence (the axis cp).

| op               | computes                                                                     |
| ---------------- | ---------------------------------------------------------------------------- |
| `attention_rows` | causal attention of this rank's rows of queries to all keys up to their own  |
| `loss_share`     | from the mean over this rank's targets its part of the mean over all ranks'  |
"""

from __future__ import annotations

from typing import Any

ATTENTION = "scaled_dot_product_attention"
ATTENTION_ROWS = "attention_rows"
LOSS_SHARE = "loss_share"
# Fused attention, whatever its form: the first operands are queries, keys and values.
ATTENTIONS = frozenset({ATTENTION, ATTENTION_ROWS})


def rows_arguments(
    query: Any, key: Any, value: Any, scale: float | None, grouped: bool, ranks: int, group: str
) -> tuple[Any, ...]:
    """The arguments of `attention_rows`, in its order."""
    return query, key, value, scale, grouped, ranks, group


def rows_share(queries: int, keys: int) -> float:
    """Part of all scores that the last rank computes: `queries` rows that see up to `keys` keys.

    The last rank has the most to do, and the others wait for it: it gives the price.
    """
    return 1.0 - queries / (2.0 * keys)
