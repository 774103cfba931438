"""Bytes that an op allocates beside its results, and frees before it returns.

all_gather, pad     along dim 0 no copy; else the pieces come one after the other and are joined
reduce_scatter      the same before the sum
all_to_all          the outgoing pieces and the incoming ones
vocab_cross_entropy one wide copy of the logits
cross_entropy       backward: the gradient of the log-probabilities beside that of the logits
token_cross_entropy the same in float32
softmax             to a wider type: a wide copy of the operand, and of its gradient in the backward
                    (a GPU's kernels widen what they read, and need none)
experts             see `autopar.passes.analysis.expert_workspace`

Other ops of torch are taken to need none. A collective's backward is its
conjugate's forward, on a gradient of the same size as its result.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.experts import EXPERTS
from autopar.passes.analysis.expert_workspace import experts_workspace
from autopar.program import tensors_of

# The conjugate's name, where the backward of an op is another op.
_CONJUGATE = {
    "all_gather": "reduce_scatter",
    "all_gather_slice": "slice",
    "reduce_scatter": "all_gather",
    "slice": "all_gather",
    "all_to_all": "all_to_all",
}
_LOSSES = ("vocab_cross_entropy", "vocab_cross_entropy_parts")


def forward_workspace(node: fx.Node) -> int:
    """Bytes of workspace when the op of a call runs."""
    name = _name(node)
    if name in EXPERTS:
        return experts_workspace(node)[0]
    if name in _LOSSES:
        return _wide_bytes(node)
    if _widens(node):
        return _bytes(node)
    return _moved(name, node, _bytes(node.args[0]), _bytes(node)) if name else 0


def backward_workspace(node: fx.Node) -> int:
    """Bytes of workspace when the backward of a call runs."""
    if getattr(node.target, "_opname", "") == "cross_entropy_loss":
        return _bytes(node.args[0])
    if _widens(node):
        return _bytes(node) - _bytes(node.args[0])
    name = _name(node)
    if name in EXPERTS:
        return experts_workspace(node)[1]
    if name == "token_cross_entropy":
        return 2 * _wide_bytes(node) - _bytes(node.args[0])
    if name in _LOSSES:
        logits = node.args[0]
        wide = _wide_bytes(node)
        # The gradient of wide logits is made in the result itself.
        return wide if wide > _bytes(logits) else 0
    name = _CONJUGATE.get(name, "")
    return _moved(name, node, _bytes(node), _bytes(node.args[0])) if name else 0


def _widens(node: fx.Node) -> bool:
    """Whether a softmax has a wider type than its operand."""
    known = getattr(node.target, "_opname", "") in ("softmax", "log_softmax")
    return known and _bytes(node) > _bytes(node.args[0])


def _moved(name: str, node: fx.Node, before: int, after: int) -> int:
    if name == "all_to_all":
        return before + after
    along_first = len(node.args) > 1 and node.args[1] == 0
    if along_first:
        return 0
    return {"all_gather": after, "all_gather_slice": after, "reduce_scatter": before}.get(name, 0)


def _name(node: fx.Node) -> str:
    target = node.target
    if getattr(target, "namespace", "") != "autopar":
        return ""
    return str(getattr(target, "_opname", ""))


def _bytes(value: object) -> int:
    if not isinstance(value, fx.Node):
        return 0
    return sum(t.nbytes for t in tensors_of(value.meta["val"]))


def _wide_bytes(node: fx.Node) -> int:
    logits = node.args[0]
    assert isinstance(logits, fx.Node)
    value = logits.meta["val"]
    size = 8 if value.dtype == torch.float64 else 4
    return int(value.numel()) * size
