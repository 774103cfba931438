"""Causal attention of a rank's rows of queries.

Ranks hold contiguous parts of the sequence in their order, and all keys and values. Rank r of n
with m rows attends to the first (r + 1) m keys, with the mask aligned at the lower right corner:
its last row sees the last of these keys. Later keys are not read, so ranks do unequal work.
"""

from __future__ import annotations

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from autopar.runtime.op_library import LIBRARY
from autopar.runtime.torch_compat import resolve_group

Tensor = torch.Tensor


def _rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    grouped: bool,
    ranks: int,
    group: str,
) -> Tensor:
    if query.is_meta:
        return query.new_empty((*query.shape[:-1], value.shape[-1]))
    rows = query.shape[-2]
    seen = rows * (resolve_group(group).rank() + 1)
    return scaled_dot_product_attention(
        query,
        key.narrow(-2, 0, seen),
        value.narrow(-2, 0, seen),
        attn_mask=causal_lower_right(rows, seen),
        scale=scale,
        enable_gqa=grouped,
    )


LIBRARY.define(
    "attention_rows(Tensor query, Tensor key, Tensor value, float? scale, bool grouped, int ranks, "
    "str group) -> Tensor"
)
LIBRARY.impl("attention_rows", _rows, "CompositeImplicitAutograd")
