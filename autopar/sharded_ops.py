"""Ops that compute on shards what the original op computes on the whole: the two ends of a language model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.collectives import group_rank, sum_over


def _vocab_embedding(weight: Tensor, ids: Tensor, padding_idx: int, ranks: int, group: str) -> Tensor:
    """Rows of the table are split over the ranks; ids of other ranks' rows give zeros. S(0) -> P"""
    rows = weight.shape[0]
    start = group_rank(weight, group) * rows
    local = ids - start
    inside = (local >= 0) & (local < rows)
    if padding_idx >= 0:
        inside_padding = start <= padding_idx < start + rows
        padding = padding_idx - start if inside_padding else None
    else:
        padding = None
    found = F.embedding(local.where(inside, torch.zeros_like(local)), weight)
    keep = inside if padding is None else inside & (local != padding)
    # The padding row is looked up but gets no gradient.
    masked = found * keep.unsqueeze(-1)
    if padding is not None:
        at_padding = (inside & (local == padding)).unsqueeze(-1)
        masked = masked + found.detach() * at_padding
    return masked


class _VocabCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of logits whose classes are split over the ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignore: int, ranks: int, group: str) -> Tensor:
        classes = logits.shape[1]
        scores = logits.float()
        top = sum_over(scores.amax(1), group, "max")
        scores = (scores - top[:, None]).exp_()
        total = sum_over(scores.sum(1), group)
        local = target - group_rank(logits, group) * classes
        inside = (local >= 0) & (local < classes)
        local = local.where(inside, torch.zeros_like(local))
        picked = (logits.gather(1, local[:, None])[:, 0].float() - top) * inside
        picked = sum_over(picked, group)
        valid = target != ignore
        count = valid.sum()
        losses = (total.log() - picked).where(valid, torch.zeros_like(total))
        probabilities = scores.div_(total[:, None]).to(logits.dtype)
        ctx.save_for_backward(probabilities, local, inside, valid, count)
        return (losses.sum() / count).to(logits.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        probabilities, local, inside, valid, count = ctx.saved_tensors
        scale = (gradient / count).to(probabilities.dtype)
        result = probabilities.clone()
        result.scatter_add_(1, local[:, None], -inside[:, None].to(result.dtype))
        # A where, not a product: with no valid target the scale is infinite.
        weight = scale.expand_as(valid).where(valid, torch.zeros_like(scale))
        return result.mul_(weight[:, None]), None, None, None, None


def _vocab_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, ranks: int, group: str
) -> Tensor:
    """logits [t, c / ranks], target [t] -> the whole mean on every rank. S(1) -> R"""
    assert not label_smoothing
    return _VocabCrossEntropy.apply(logits, target, ignore_index, ranks, group)  # type: ignore[no-untyped-call,no-any-return]


def _token_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, ranks: int, group: str
) -> Tensor:
    """logits [t / ranks, c], target [t / ranks] -> a term of the mean over all targets. S(0) -> P"""
    count = sum_over((target != ignore_index).sum(), group)
    total = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")
    return total / count


_library = torch.library.Library("autopar", "FRAGMENT")
for _schema, _function in (
    ("vocab_embedding(Tensor weight, Tensor ids, int padding_idx, int ranks, str group) -> Tensor", _vocab_embedding),
    (
        "vocab_cross_entropy(Tensor logits, Tensor target, int ignore_index, float label_smoothing, int ranks, "
        "str group) -> Tensor",
        _vocab_cross_entropy,
    ),
    (
        "token_cross_entropy(Tensor logits, Tensor target, int ignore_index, int ranks, str group) -> Tensor",
        _token_cross_entropy,
    ),
):
    _library.define(_schema)
    _library.impl(_schema.split("(")[0], _function, "CompositeImplicitAutograd")
