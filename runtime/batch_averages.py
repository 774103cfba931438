"""Values of a batch that are the mean or the sum of those of its parts, over the ranks of a group.

batch_average(x, ranks)   the mean of what the ranks have
batch_total(x)            the sum of it

Every rank goes on with the same value, so the gradient of a rank's own is made of all ranks'
gradients of it. They are added up in float32 at least.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from autopar.runtime.op_library import define
from autopar.runtime.torch_compat import resolve_group

Tensor = torch.Tensor


def _total(x: Tensor, group: str) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32) if x.is_floating_point() else x.dtype
    total = x.to(wide, copy=True).contiguous()
    dist.all_reduce(total, group=resolve_group(group))
    return total.to(x.dtype)


def _average(x: Tensor, ranks: int, group: str) -> Tensor:
    return _total(x, group) / ranks


_ops = torch.ops.autopar
define(
    "batch_average(Tensor x, int ranks, str group) -> Tensor",
    _average,
    lambda x, *rest: torch.empty_like(x),
    lambda grad, ranks, group: _ops.batch_average(grad, ranks, group),
)
define(
    "batch_total(Tensor x, str group) -> Tensor",
    _total,
    lambda x, *rest: torch.empty_like(x),
    lambda grad, group: _ops.batch_total(grad, group),
)
