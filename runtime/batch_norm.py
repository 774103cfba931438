"""Batch statistics over all ranks of a group, each of which holds as many samples.

The mean of n samples in r parts is the mean of the parts' means, and their squared deviations add
up with those of the means (Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for
computing sample variances", 1979): one message, and no difference of large numbers.

batch_norm      y = (x - mean) / sqrt(variance + eps) * weight + bias, per channel (dim 1)
batch_mean      the mean over dims; no gradient
batch_variance  the unbiased variance over dims; no gradient
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.op_library import LIBRARY, define_with_context
from autopar.runtime.torch_compat import all_gather_single, resolve_group

Tensor = torch.Tensor
_ops = torch.ops.autopar


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _moments(x: Tensor, dims: list[int], ranks: int, group: str) -> tuple[Tensor, Tensor, int]:
    """Mean, sum of squared deviations, and number of elements that they are of."""
    values = _wide(x)
    own = values.mean(dims)
    deviations = values.var(dims, correction=0)
    both = torch.stack([own, deviations])
    parts = both.new_empty((ranks * 2, *own.shape))
    all_gather_single(parts, both, group=resolve_group(group))
    means, squares = parts.view(ranks, 2, *own.shape).unbind(1)
    mean = means.mean(0)
    count = x.numel() // max(own.numel(), 1)
    squared = count * (squares.sum(0) + (means - mean).square().sum(0))
    return mean, squared, count * ranks


def _along_channels(value: Tensor, dims: int) -> Tensor:
    return value.view(1, -1, *([1] * (dims - 2)))


def _all_but_channels(x: Tensor) -> list[int]:
    return [d for d in range(x.dim()) if d != 1]


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, ranks: int, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and mean and inverse standard deviation per channel."""
    mean, squared, count = _moments(x, _all_but_channels(x), ranks, group)
    inverse = (squared / count + eps).rsqrt()
    result = (_wide(x) - _along_channels(mean, x.dim())) * _along_channels(inverse, x.dim())
    if weight is not None:
        result = result * _along_channels(_wide(weight), x.dim())
    if bias is not None:
        result = result + _along_channels(_wide(bias), x.dim())
    return result.to(x.dtype), mean, inverse


def _forward_fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    kept = x.new_empty((x.shape[1],), dtype=wide)
    return torch.empty_like(x), kept, torch.empty_like(kept)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, _, ctx.ranks, ctx.group = inputs
    ctx.bias = bias is not None
    ctx.save_for_backward(x, weight, output[1], output[2])


def _backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Any, ...]:
    x, weight, mean, inverse = ctx.saved_tensors
    terms = _ops.batch_norm_gradient(grad, x, weight, mean, inverse, ctx.ranks, ctx.group)
    of_x, of_weight, of_bias = terms
    scale = of_weight.to(weight.dtype) if weight is not None else None
    shift = of_bias.to(weight.dtype if weight is not None else x.dtype) if ctx.bias else None
    return (of_x, scale, shift, None, None, None)


def _gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    ranks: int,
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Of x, weight and bias. Every sample moves the statistics, and so the results of all ranks:
    with n elements per channel on all ranks, and g the gradient of the normalised value z,

        dx = (g - sum(g) / n - z sum(g z) / n) / sqrt(variance + eps)

    Gradients of weight and bias are of this rank's samples: they are summed over dp as others are.
    """
    dims, rank = _all_but_channels(x), x.dim()
    normal = (_wide(x) - _along_channels(mean, rank)) * _along_channels(inverse, rank)
    wide = _wide(grad)
    sums = torch.stack([wide.sum(dims), (wide * normal).sum(dims)])
    of_bias, of_weight = sums.clone().unbind(0)
    dist.all_reduce(sums, group=resolve_group(group))
    count = x.numel() // max(x.shape[1], 1) * ranks
    shift, slope = (sums / count).unbind(0)
    result = wide - _along_channels(shift, rank) - normal * _along_channels(slope, rank)
    scale = inverse if weight is None else inverse * _wide(weight)
    result = result * _along_channels(scale, rank)
    return result.to(x.dtype), of_weight, of_bias


def _gradient_fake(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _forward_fake(x)


def _mean(x: Tensor, dims: list[int], ranks: int, group: str) -> Tensor:
    return _moments(x, dims, ranks, group)[0].to(x.dtype)


def _variance(x: Tensor, dims: list[int], ranks: int, group: str) -> Tensor:
    _, squared, count = _moments(x, dims, ranks, group)
    return (squared / (count - 1)).to(x.dtype)


_ARGUMENTS = "(Tensor x, Tensor? weight, Tensor? bias, float eps, int ranks, str group)"
define_with_context(
    f"batch_norm_parts{_ARGUMENTS} -> (Tensor, Tensor, Tensor)",
    _forward,
    _forward_fake,
    _setup,
    _backward,
)
LIBRARY.define(f"batch_norm{_ARGUMENTS} -> Tensor")
LIBRARY.impl(
    "batch_norm", lambda *args: _ops.batch_norm_parts(*args)[0], "CompositeImplicitAutograd"
)
LIBRARY.define(
    "batch_norm_gradient(Tensor grad, Tensor x, Tensor? weight, Tensor mean, Tensor inverse, "
    "int ranks, str group) -> (Tensor, Tensor, Tensor)"
)
for _name, _kernel in (("batch_mean", _mean), ("batch_variance", _variance)):
    LIBRARY.define(f"{_name}(Tensor x, int[] dims, int ranks, str group) -> Tensor")
    for _device in ("CPU", "CUDA"):
        LIBRARY.impl(_name, _kernel, _device)
    torch.library.register_fake(
        f"autopar::{_name}", lambda x, dims, *rest: x.mean(dims), lib=LIBRARY
    )
for _device in ("CPU", "CUDA"):
    LIBRARY.impl("batch_norm_gradient", _gradient, _device)
torch.library.register_fake("autopar::batch_norm_gradient", _gradient_fake, lib=LIBRARY)
