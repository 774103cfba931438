"""`embedding_bag` on a table of indices as a lookup and a reduction, which have sharding rules.

    embedding_bag(ids[b, l], weight)   ->   sum(embedding(ids, weight), 1)

torch makes one long row of the indices and says where each bag begins: from that no op can tell
that bags don't depend on each other. Where the gradient is sparse or scaled by
counts, or rows are renormalised in place, the op stays.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_SIGNATURE = inspect.signature(F.embedding_bag)


def bags_of_rows(*args: Any, **kwargs: Any) -> Tensor | None:
    """The value of that `embedding_bag` call, [bags, width]; None where the op has to stay."""
    given = _SIGNATURE.bind(*args, **kwargs)
    given.apply_defaults()
    said = given.arguments
    ids, weight, mode = said["input"], said["weight"], said["mode"]
    if ids.dtype not in (torch.int32, torch.int64):
        ids, weight = weight, ids  # an order that torch still takes
    kept = said["scale_grad_by_freq"] or said["sparse"] or said["max_norm"] is not None
    if kept or ids.dim() != 2 or said["offsets"] is not None:
        return None
    factors = said["per_sample_weights"]
    if mode not in ("sum", "mean", "max") or (factors is not None and mode != "sum"):
        return None  # torch tells what is wrong
    rows = F.embedding(ids, weight)
    return _reduced(ids, rows, mode, said["padding_idx"], factors, weight.shape[0])


def _reduced(
    ids: Tensor, rows: Tensor, mode: str, padding: int | None, factors: Tensor | None, count: int
) -> Tensor:
    if factors is not None:
        rows = rows * factors.unsqueeze(-1)
    if padding is None:
        return rows.max(1).values if mode == "max" else getattr(rows, mode)(1)
    # A padding index is no member of its bag; a bag without members is 0.
    used = (ids != padding % count).unsqueeze(-1)
    if mode == "max":
        largest = rows.masked_fill(~used, float("-inf")).max(1).values
        return torch.where(used.any(1), largest, 0.0)
    total = rows.masked_fill(~used, 0.0).sum(1)
    return total / used.sum(1).clamp(min=1) if mode == "mean" else total
