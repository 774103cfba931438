"""Rules of the ops that splitting the sequence (axis cp) puts into a graph: what another axis may
do with them.

The dims that cp moves are whole; all others pass through, and so do terms of a sum, as every
collective is linear.
"""

from __future__ import annotations

from autopar.op_call import OpCall
from autopar.rules.attention import attention
from autopar.rules.dims import describe, named, with_whole
from autopar.rules.language import Rule

# Name -> how many of the arguments after the tensor are dims.
COLLECTIVES = {
    "copy": 0,
    "all_reduce": 0,
    "all_reduce_both": 0,
    "first_rank_only": 0,
    "first_rank_gradient": 0,
    "own_random": 0,
    "same_random": 0,
    "all_gather": 1,
    "all_gather_slice": 1,
    "pad": 1,
    "reduce_scatter": 1,
    "slice": 1,
    "slice_pad": 1,
    "all_to_all": 2,
}


def collective(op: OpCall) -> Rule:
    """One tensor; the dims that its arguments name are whole before and after."""
    rank = len(op.types[0].shape)
    dims = {int(a) for a in op.args[1 : 1 + COLLECTIVES[op.op_name]]}
    before, after = with_whole(rank, dims), with_whole(rank, dims, "_r")
    return describe(op, {"x": before}, after, linear=[["x"]])


def attention_rows(op: OpCall) -> Rule | None:
    """As causal attention: batch and heads are free."""
    return attention(op, grouped=bool(op.named("grouped")), whole={"q"})


def loss_share(op: OpCall) -> Rule:
    """loss[] and its targets: linear in the loss."""
    targets = named(op.types[1].shape, "_t")
    return describe(op, {"loss": (), "target": targets}, (), linear=[["loss"]])
