"""The two ends of a language model with the vocabulary, or the tokens, split over ranks.

vocab_embedding      rows of the table split: each rank looks up its own rows       -> P
vocab_cross_entropy  classes split: the whole loss on every rank                    S(1) -> R
token_cross_entropy  tokens split: this rank's part of the mean                     S(0) -> P

Losses compute in float32 (float64 for float64) and come back in the dtype of the logits, and equal
`torch.nn.functional.cross_entropy` with reduction "mean", NaN for no target at all included.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch.nn import functional

from autopar.runtime.op_library import LIBRARY, define_with_context
from autopar.runtime.torch_compat import resolve_group

Tensor = torch.Tensor
_ops = torch.ops.autopar


def _own(index: Tensor, size: int, ranks: int, group: str) -> tuple[Tensor, Tensor]:
    """Which of `index` fall in this rank's range of `size`, and their place in it (else 0)."""
    # On an accelerator the check would wait for the device; there the loss is NaN.
    known = index.device.type == "cpu" and not isinstance(index, FakeTensor)
    if known and index.numel() and int(index.max()) >= size * ranks:
        raise IndexError(f"index {int(index.max())} is out of range for {size * ranks} entries")
    start = resolve_group(group).rank() * size
    own = (index >= start) & (index < start + size)
    return own, torch.where(own, index - start, 0)


def _embedding(weight: Tensor, ids: Tensor, padding_idx: int, ranks: int, group: str) -> Tensor:
    own, local = _own(ids, weight.shape[0], ranks, group)
    return functional.embedding(local, weight).masked_fill_(~own.unsqueeze(-1), 0)


def _embedding_fake(
    weight: Tensor, ids: Tensor, padding_idx: int, ranks: int, group: str
) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _embedding_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, ids, ctx.padding_idx, ctx.ranks, ctx.group = inputs
    ctx.rows = weight.shape[0]
    ctx.save_for_backward(ids)


def _embedding_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (ids,) = ctx.saved_tensors
    rest = (ctx.rows, ctx.padding_idx, ctx.ranks, ctx.group)
    return (_ops.vocab_embedding_gradient(grad, ids, *rest), None, None, None, None)


def _embedding_gradient(
    grad: Tensor, ids: Tensor, rows: int, padding_idx: int, ranks: int, group: str
) -> Tensor:
    own, local = _own(ids, rows, ranks, group)
    keep = own & (ids != padding_idx) if padding_idx >= 0 else own
    masked = grad * keep.unsqueeze(-1).to(grad.dtype)
    result: Tensor = torch.ops.aten.embedding_dense_backward(masked, local, rows, -1, False)
    return result


define_with_context(
    "vocab_embedding(Tensor weight, Tensor ids, int padding_idx, int ranks, str group) -> Tensor",
    _embedding,
    _embedding_fake,
    _embedding_setup,
    _embedding_backward,
)
LIBRARY.define(
    "vocab_embedding_gradient"
    "(Tensor grad, Tensor ids, int rows, int padding_idx, int ranks, str group) -> Tensor"
)
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("vocab_embedding_gradient", _embedding_gradient, _device)
torch.library.register_fake(
    "autopar::vocab_embedding_gradient",
    lambda grad, ids, rows, *rest: grad.new_empty((rows, grad.shape[-1])),
    lib=LIBRARY,
)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _minus(logits: Tensor, rows: Tensor) -> Tensor:
    """A new wide tensor: `logits` less a number for each row."""
    wide = _wide(logits)
    return wide - rows.unsqueeze(1) if wide is logits else wide.sub_(rows.unsqueeze(1))


def _vocab_loss(
    logits: Tensor, target: Tensor, ignore_index: int, smoothing: float, ranks: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss, and for the backward: each token's log-sum-exp and the count of targets."""
    process_group = resolve_group(group)
    top = _wide(logits.amax(dim=1))
    dist.all_reduce(top, dist.ReduceOp.MAX, group=process_group)
    # One wide copy of the logits is all that there is room for.
    shifted = _minus(logits, top)
    valid = target != ignore_index
    own, local = _own(torch.where(valid, target, 0), logits.shape[1], ranks, group)
    picked = shifted.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~own, 0)
    total = shifted.sum(1) if smoothing else None
    terms = [shifted.exp_().sum(1), picked, own.to(shifted.dtype)]
    if total is not None:
        terms.append(total)
    sums = torch.stack(terms)
    dist.all_reduce(sums, group=process_group)
    log_sum = sums[0].log()
    loss = (log_sum - sums[1]) * (1 - smoothing)
    if smoothing:
        loss = loss + (log_sum - sums[3] / (logits.shape[1] * ranks)) * smoothing
    # A target that no rank owns is out of range: NaN rather than a quiet wrong number.
    loss = torch.where(sums[2] > 0, loss, float("nan"))
    count = valid.sum().to(shifted.dtype)
    mean = torch.where(valid, loss, 0).sum() / count
    return mean.to(logits.dtype), log_sum + top, count


def _vocab_loss_fake(logits: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return (
        logits.new_empty(()),
        logits.new_empty((logits.shape[0],), dtype=wide),
        logits.new_empty((), dtype=wide),
    )


def _vocab_loss_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, target, *ctx.rest = inputs
    ctx.save_for_backward(logits, target, output[1], output[2])


def _vocab_loss_backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Any, ...]:
    result = _ops.vocab_cross_entropy_gradient(grad, *ctx.saved_tensors, *ctx.rest)
    return (result, None, None, None, None, None)


def _vocab_loss_gradient(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    log_sum: Tensor,
    count: Tensor,
    ignore_index: int,
    smoothing: float,
    ranks: int,
    group: str,
) -> Tensor:
    """softmax - target distribution, scaled; this rank's classes."""
    valid = target != ignore_index
    own, local = _own(torch.where(valid, target, 0), logits.shape[1], ranks, group)
    result = _minus(logits, log_sum).exp_()
    if smoothing:
        result -= smoothing / (logits.shape[1] * ranks)
    hit = own.to(result.dtype).mul_(smoothing - 1)
    result.scatter_add_(1, local.unsqueeze(1), hit.unsqueeze(1))
    result *= torch.where(valid, grad.to(result.dtype) / count, 0).unsqueeze(1)
    return result.to(logits.dtype)


_LOSS_ARGUMENTS = "int ignore_index, float label_smoothing, int ranks, str group"
define_with_context(
    "vocab_cross_entropy_parts(Tensor logits, Tensor target, "
    f"{_LOSS_ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
    _vocab_loss,
    _vocab_loss_fake,
    _vocab_loss_setup,
    _vocab_loss_backward,
)
LIBRARY.define(
    "vocab_cross_entropy_gradient(Tensor grad, Tensor logits, Tensor target, Tensor log_sum, "
    f"Tensor count, {_LOSS_ARGUMENTS}) -> Tensor"
)
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("vocab_cross_entropy_gradient", _vocab_loss_gradient, _device)
torch.library.register_fake(
    "autopar::vocab_cross_entropy_gradient",
    lambda grad, logits, *rest: torch.empty_like(logits),
    lib=LIBRARY,
)
LIBRARY.define(f"vocab_cross_entropy(Tensor logits, Tensor target, {_LOSS_ARGUMENTS}) -> Tensor")
LIBRARY.impl(
    "vocab_cross_entropy",
    lambda *args: _ops.vocab_cross_entropy_parts(*args)[0],
    "CompositeImplicitAutograd",
)


def _token_loss(
    logits: Tensor, target: Tensor, ignore_index: int, ranks: int, group: str
) -> Tensor:
    count = _ops.count_targets(target, ignore_index, group).to(_wide(logits[:0]).dtype)
    total = functional.cross_entropy(
        _wide(logits), target, ignore_index=ignore_index, reduction="sum"
    )
    mean: Tensor = total / count
    return mean.to(logits.dtype)


def _count_targets(target: Tensor, ignore_index: int, group: str) -> Tensor:
    """Number of targets on all ranks together."""
    count = (target != ignore_index).sum()
    dist.all_reduce(count, group=resolve_group(group))
    return count


LIBRARY.define("count_targets(Tensor target, int ignore_index, str group) -> Tensor")
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("count_targets", _count_targets, _device)
torch.library.register_fake(
    "autopar::count_targets",
    lambda target, *rest: target.new_empty((), dtype=torch.int64),
    lib=LIBRARY,
)
LIBRARY.define(
    "token_cross_entropy(Tensor logits, Tensor target, int ignore_index, int ranks, str group) "
    "-> Tensor"
)
LIBRARY.impl("token_cross_entropy", _token_loss, "CompositeImplicitAutograd")
