"""Small numbers that tell whether ranks hold the same values: weights when a program is made, the
rows of a batch in every step."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn
from torch._guards import active_fake_mode

Tensor = torch.Tensor
# Whole numbers of the width of an element; sums of their products with small factors stay in int64.
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# A prime: round floats have low bits of zero. Squares of digests, summed over 100,000 ranks, are
# exact in float64.
BELOW = 262_139


def weights_digest(model: nn.Module) -> str:
    """Of the values of all parameters and buffers that are not on the meta device ('' for none)."""
    if active_fake_mode() is not None:  # a dry run has shapes, no values
        return ""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    real = {name: t.detach() for name, t in tensors.items() if not t.is_meta and t.numel()}
    sums: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for tensor in real.values():
            sums.setdefault(tensor.device, []).append(_bits(tensor).sum(dtype=torch.int64))
        found = [torch.stack(part).tolist() for part in sums.values()]
    return hashlib.sha256(repr((list(real), found)).encode()).hexdigest()[:16] if real else ""


def batch_digest(batch: Mapping[str, Tensor]) -> int:
    """Of the rows of a batch and their order, 0 <= digest < `BELOW`."""
    if active_fake_mode() is not None or not batch:
        return 0
    with torch.no_grad():
        parts = [_rows(value) * (2 * i + 1) for i, (_, value) in enumerate(sorted(batch.items()))]
        return int(torch.stack(parts).sum()) % BELOW


def _rows(value: Tensor) -> Tensor:
    """A whole number of the values, in which every row has a weight of its own."""
    bits = _bits(value.detach()) if value.numel() else torch.zeros(1, device=value.device)
    bits = bits.reshape(value.shape[0] if value.dim() and value.numel() else 1, -1)
    sums = bits.sum(1, dtype=torch.int64)
    return (sums * torch.arange(1, len(sums) + 1, device=value.device)).sum()


def _bits(value: Tensor) -> Tensor:
    """The memory of `value` as whole numbers."""
    real = torch.view_as_real(value) if value.is_complex() else value
    return real.contiguous().view(_WHOLE[real.element_size()])
