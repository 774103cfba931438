"""Embedding: a lookup into a table that can be split over its rows or its columns."""

from __future__ import annotations

from autopar.op_call import OpCall
from autopar.placement import Partial
from autopar.rules.language import Rule, parse


def embedding(op: OpCall) -> Rule | None:
    """weight[v, d], ids[...] -> [..., d]; a rank looks up only its own rows, others give zero."""
    if op.argument(3, "scale_grad_by_freq", False) or op.argument(4, "sparse", False):
        return None
    return parse(
        "v d, b* -> b* d",
        op,
        linear=[{0}],
        local_ops={"v": "vocab_embedding"},
        outcomes={"v": Partial},
    )
