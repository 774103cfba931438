"""A rank's part of a mean over the targets of all ranks, from the mean over its own targets."""

from __future__ import annotations

import torch

from autopar.runtime.op_library import LIBRARY

Tensor = torch.Tensor


def _share(loss: Tensor, target: Tensor, ignore_index: int, ranks: int, group: str) -> Tensor:
    """Summed over the ranks it is the mean over all targets; NaN when there is none."""
    own = (target != ignore_index).sum()
    total = torch.ops.autopar.count_targets(target, ignore_index, group)
    wide = loss if loss.dtype == torch.float64 else loss.float()
    part = wide * (own / total).to(wide.dtype)
    # The mean over no target of its own is NaN, and adds nothing to that over all.
    return torch.where((own == 0) & (total > 0), torch.zeros_like(part), part).to(loss.dtype)


LIBRARY.define(
    "loss_share(Tensor loss, Tensor target, int ignore_index, int ranks, str group) -> Tensor"
)
LIBRARY.impl("loss_share", _share, "CompositeImplicitAutograd")
