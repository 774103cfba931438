"""Embedding and cross entropy: the ends of a language model, both shardable over the vocabulary."""

from __future__ import annotations

from autopar.op_call import OpCall, Operand
from autopar.placement import Partial, Replicate
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


def cross_entropy(op: OpCall) -> Rule | None:
    """logits[t, c], target[t] -> mean over the targets that are not `ignore_index`.

    Sharding c (vocab-parallel loss) gives the whole loss on every rank; sharding t gives a term of
    the mean over all ranks' targets.
    """
    weight, reduction = op.argument(2, "weight"), op.argument(3, "reduction", 1)
    smoothing = op.argument(5, "label_smoothing", 0.0)
    if weight is not None or reduction != 1 or smoothing or len(op.types) != 2:
        return None
    target = op.args[1]
    if len(op.types[0].shape) != 2 or not isinstance(target, Operand) or target.index != 1:
        return None
    if op.types[1].dtype.is_floating_point:
        return None
    return parse(
        "t c, t ->",
        op,
        local_ops={"c": "vocab_cross_entropy", "t": "token_cross_entropy"},
        outcomes={"c": Replicate, "t": Partial},
    )
