"""Loss scaling: small gradients in float16 become 0 unless the loss is made larger first.

The loss is multiplied before the backward and the gradients divided after it. A scale that is too
large makes them infinite, or NaN; that step is then skipped, on all ranks (mixed precision
training, Micikevicius et al., arXiv:1710.03740, section 3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autopar.errors import UsageError
from autopar.runtime.ranks import Ranks, together

Tensor = torch.Tensor


def checked_scale(loss_scale: float) -> float:
    """Raises `UsageError` unless it is a positive, finite number."""
    if not (math.isfinite(loss_scale) and loss_scale > 0):
        raise UsageError(f"loss_scale={loss_scale!r}", next_step="give a positive number")
    return float(loss_scale)


def unscale(gradients: Sequence[Tensor], loss_scale: float, ranks: Ranks) -> bool:
    """Divide this rank's gradients in place; whether those of all ranks are finite. Collective."""
    with torch.no_grad():
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for gradient in gradients:
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
        for same in by_dtype.values():
            torch._foreach_mul_(same, 1.0 / loss_scale)
    (bad,) = together(ranks, None, (float(not finite),))
    return bad == 0
