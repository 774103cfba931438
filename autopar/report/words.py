"""The field's words for a strategy: what practitioners call `shard n` of a linear layer."""

from __future__ import annotations

import re

MATMULS = {"linear", "mm", "addmm", "bmm", "baddbmm", "matmul", "conv1d", "einsum"}
LOOKUPS = {"embedding", "vocab_embedding"}
ATTENTIONS = {"scaled_dot_product_attention", "attention_rows", "sdpa", "flex_attention"}
LOSSES = {
    "cross_entropy", "cross_entropy_loss", "nll_loss", "vocab_cross_entropy", "token_cross_entropy",
    "mse_loss",
}  # fmt: skip
EXPERTS = {"experts", "own_experts", "exchanged_experts", "grouped_mm", "_grouped_mm"}
EXPERT_WORDS = {
    "e": "expert-parallel",
    "i": "tensor-parallel inside experts",
    "t,e": "expert-parallel, all-to-all",
}
NORMS = {"layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm"}
RENAMES = {
    "view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice",
    "select", "to", "_to_copy", "contiguous", "clone", "alias", "detach", "getitem", "flatten",
    "unflatten", "movedim", "split", "chunk", "unbind", "narrow",
}  # fmt: skip
MAIN_OPS = MATMULS | LOOKUPS | ATTENTIONS | LOSSES | EXPERTS

_COUNTER = re.compile(r"[._]\d+$")
_FACTOR = re.compile(r"^([a-z]+)(\d*)$")


def op_of(node: str) -> str:
    """The operator behind a graph node's name: `linear_12`, `linear.12` -> `linear`."""
    return _COUNTER.sub("", node)


def rank_of(op: str) -> int:
    """Order in which ops are told: lookups, products, attention, losses, then the rest."""
    for index, family in enumerate((LOOKUPS | MATMULS | ATTENTIONS | EXPERTS, LOSSES)):
        if op in family:
            return index
    return 2


def strategy_words(op: str, strategy: str, placement: str = "", dims: int = 0) -> str:
    """`linear`, `shard n` -> `column-parallel`.

    `placement` and number of `dims` of the result settle what the factor alone leaves open (dim 1
    is the sequence in [batch, sequence, hidden], the heads inside attention); 0 is not known.
    """
    if strategy.startswith("partial"):
        return "carries partial sums"
    if strategy == "replicate*":
        return "replicated, gradients summed"
    if not strategy.startswith("shard "):
        return "replicated" if strategy in ("", "replicate") else strategy
    factor = strategy.removeprefix("shard ").strip()
    return _special_words(op, factor) or _dim_words(op, factor, placement, dims)


def _special_words(op: str, factor: str) -> str:
    if op in MATMULS and factor in ("n", "k"):
        return "column-parallel" if factor == "n" else "row-parallel"
    if op in LOOKUPS and factor in ("v", "d"):
        return "vocab-parallel" if factor == "v" else "column-parallel"
    if op in ATTENTIONS and factor in ("g", "h"):
        return "head-parallel"
    if op in ATTENTIONS and factor == "q":
        return "context-parallel"
    if op in LOSSES and factor in ("c", "v"):
        return "vocab-parallel"
    if op in EXPERTS and factor in EXPERT_WORDS:
        return EXPERT_WORDS[factor]
    if op in LOSSES | EXPERTS and factor == "t" or op in MATMULS and factor == "m":
        return "token-parallel"
    return ""


def _dim_words(op: str, factor: str, placement: str, dims: int) -> str:
    """Other factors are named after the dim they shard."""
    if factor == "b":
        return "batch-parallel"
    found = _FACTOR.match(factor)
    at = placement[2:-1] if placement.startswith("S(") else found.group(2) if found else ""
    if at not in ("0", "1"):
        return f"sharded along dim {at}" if at else f"sharded along {factor}"
    if not dims and op in MATMULS | LOOKUPS | NORMS:
        dims = 3
    if dims == 3 or (dims == 4 and at == "0"):
        return "batch-parallel" if at == "0" else "sequence-parallel"
    return "token-parallel" if dims == 2 and at == "0" else f"sharded along dim {at}"


def placement_words(placement: str) -> str:
    """The legend's sentence for one placement text."""
    if placement.startswith("S("):
        return f"sharded along dim {placement[2:-1]}"
    return {
        "R": "replicated",
        "R*": "replicated, each rank has a term of the gradient",
        "P": "partial: each rank has a term of the sum",
    }.get(placement, placement)
