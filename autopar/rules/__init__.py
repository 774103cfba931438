"""From an op to its rule: one explicit table. An op that is not in it is replicated, visibly."""

from __future__ import annotations

from collections.abc import Callable

from autopar.op_call import OpCall
from autopar.rules import attention, lookup, matmul, pointwise, reduction, shape
from autopar.rules.language import NoRuleError, Rule

RuleFunction = Callable[[OpCall], Rule | None]

RULES: dict[str, RuleFunction] = {
    **dict.fromkeys(pointwise.NAMES, pointwise.rule),
    "linear": matmul.linear,
    "mm": matmul.mm,
    "addmm": matmul.addmm,
    "bmm": matmul.bmm,
    "baddbmm": matmul.baddbmm,
    "matmul": matmul.matmul,
    "view": shape.view,
    "reshape": shape.view,
    "_unsafe_view": shape.view,
    "flatten": shape.flatten,
    "unflatten": shape.flatten,
    "expand": shape.expand,
    "transpose": shape.transpose,
    "permute": shape.transpose,
    "t": shape.transpose,
    "unsqueeze": shape.unsqueeze,
    "squeeze": shape.squeeze,
    "slice": shape.slice_,
    "split": shape.split,
    "split_with_sizes": shape.split,
    "chunk": shape.split,
    "cat": shape.cat,
    "stack": shape.stack,
    "select": shape.select,
    "pad": shape.pad,
    "getitem": shape.getitem,
    "sum": reduction.sum_,
    "mean": reduction.mean,
    "amax": reduction.extreme,
    "amin": reduction.extreme,
    "argmax": reduction.extreme,
    "any": reduction.extreme,
    "all": reduction.extreme,
    "softmax": reduction.softmax,
    "_softmax": reduction.softmax,
    "log_softmax": reduction.softmax,
    "_log_softmax": reduction.softmax,
    "cumsum": reduction.cumsum,
    "layer_norm": reduction.normalization,
    "rms_norm": reduction.normalization,
    "scaled_dot_product_attention": attention.sdpa,
    "embedding": lookup.embedding,
    "cross_entropy_loss": lookup.cross_entropy,
}


def rule_for(op: OpCall) -> Rule | None:
    """The rule of a call, or None: then only replication is legal."""
    function = RULES.get(op.op_name)
    if function is None or not op.results:
        return None
    try:
        return function(op)
    except NoRuleError:
        # An unusual form of a known op: the same operand twice, a vector for a matrix.
        return None
