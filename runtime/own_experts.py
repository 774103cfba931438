"""A layer's experts split over the ranks of a group: each computes what its own add to the result.

own_experts   tokens whole on every rank, rank r has the experts from r * e / ranks on   -> P

A token's choices that are other ranks' experts cost nothing here.
"""

from __future__ import annotations

from typing import Any

import torch

import autopar.experts.op  # noqa: F401 - registers the op
from autopar.experts.operands import OWN_SCHEMA, UP
from autopar.runtime.op_library import LIBRARY
from autopar.runtime.torch_compat import resolve_group

Tensor = torch.Tensor


def _own_experts(*inputs: Any) -> Tensor:
    *operands, experts, transposed, activation, ranks, group = inputs
    # On meta there is no group yet, and which experts they are makes no difference.
    rank = 0 if operands[0].is_meta else resolve_group(group).rank()
    first = rank * operands[UP].shape[0]
    result: Tensor = torch.ops.autopar.experts(*operands, experts, first, 1, transposed, activation)
    return result


LIBRARY.define(
    f"own_experts{OWN_SCHEMA}",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("own_experts", _own_experts, "CompositeImplicitAutograd")
