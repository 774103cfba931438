"""Losses. `reduction` decides: none keeps the samples' dims, a sum is partial over sharded samples,
a mean needs them whole."""

from __future__ import annotations

from autopar.op_call import OpCall, Operand
from autopar.placement import Partial, Replicate
from autopar.rules.dims import aligned, broadcast, describe, free, named, shape_of
from autopar.rules.language import Dims, NoRuleError, Rule, parse

_NONE, _MEAN, _SUM = 0, 1, 2
# One term for each element; operands broadcast.
_ELEMENTWISE_TEXT = """
mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits
kl_div soft_margin_loss margin_ranking_loss hinge_embedding_loss poisson_nll_loss
"""
ELEMENTWISE = _ELEMENTWISE_TEXT.split()
_OPERANDS = ("self", "input", "input1", "input2", "target", "weight", "pos_weight")


def elementwise(op: OpCall) -> Rule:
    """x, target and weights -> a term for each element, or their sum or mean."""
    names = [n for n in _OPERANDS if isinstance(op.named(n), Operand)]
    shapes = {n: shape_of(op, n) for n in names}
    full = broadcast(*shapes.values())
    return _reduced(op, {n: aligned(s, full) for n, s in shapes.items()}, named(full))


def embedding_pairs(op: OpCall) -> Rule:
    """cosine_embedding_loss(x[b*, d], y[b*, d], target[b*]): d whole."""
    x = shape_of(op, "input1")
    if shape_of(op, "input2") != x:
        raise _refused(op)
    dims = (*named(x[:-1]), ("_d",))
    return _reduced(op, {"input1": dims, "input2": dims, "target": dims[:-1]}, dims[:-1])


def triplets(op: OpCall) -> Rule:
    """triplet_margin_loss(anchor[b*, d], positive[b*, d], negative[b*, d]): d whole."""
    names = ("anchor", "positive", "negative")
    shapes = {shape_of(op, n) for n in names}
    if len(shapes) != 1:
        raise _refused(op)
    dims = (*named(shapes.pop()[:-1]), ("_d",))
    return _reduced(op, dict.fromkeys(names, dims), dims[:-1])


def cross_entropy(op: OpCall) -> Rule | None:
    """logits[t, c, ...] and target[t, ...], or probabilities of the logits' shape.

    The plain mean over targets has local forms: sharding c (vocab-parallel loss) gives the whole
    loss on every rank; sharding t gives a term of the mean over all ranks' targets, which has no
    smoothing. With class weights or more dims c is whole.
    """
    x, target = shape_of(op, "self"), shape_of(op, "target")
    plain = op.named("weight") is None and op.named("reduction") == _MEAN
    if plain and len(x) == 2 and len(target) == 1:
        return parse(
            "t c, t ->",
            op,
            whole=["t"] if op.named("label_smoothing") else [],
            local_ops={"c": "vocab_cross_entropy", "t": "token_cross_entropy"},
            outcomes={"c": Replicate, "t": Partial},
        )
    return nll(op)


def nll(op: OpCall) -> Rule:
    """logits[t, c, ...] or [c], target[t, ...] (or as the logits), weight[c]: c whole."""
    x, target = shape_of(op, "self"), shape_of(op, "target")
    samples: Dims = free("t") + named(x[2:]) if len(x) > 1 else ()
    dims: Dims = (*samples[:1], ("_c",), *samples[1:])
    operands = {
        "self": dims,
        "target": dims if len(target) == len(x) else samples,
        "weight": (("_c",),),
    }
    return _reduced(op, operands, samples)


def _reduced(op: OpCall, operands: dict[str, Dims], terms: Dims) -> Rule:
    reduction = op.named("reduction")
    if reduction == _NONE:
        return describe(op, operands, terms)
    whole = [] if reduction == _SUM else [d[0] for d in terms]
    return describe(op, operands, (), whole=whole)


def _refused(op: OpCall) -> NoRuleError:
    return NoRuleError(
        f"{op.op_name} of operands that broadcast", next_step="expand them before the loss"
    )
