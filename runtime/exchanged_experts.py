"""A layer's experts and its tokens split over the ranks of a group.

exchanged_experts   this rank's tokens and experts: rows travel to their experts and back   -> S(0)

Two exchanges of rows forward and two backward, and two small ones (how many rows, and weights).
"""

from __future__ import annotations

from typing import Any

import torch

import autopar.experts.op  # noqa: F401 - registers the op
from autopar.experts.exchange import exchanged
from autopar.experts.operands import OWN_SCHEMA, Operands
from autopar.runtime.op_library import LIBRARY
from autopar.runtime.torch_compat import resolve_group

Tensor = torch.Tensor


def _exchanged_experts(*inputs: Any) -> Tensor:
    *tensors, experts, transposed, activation, ranks, group = inputs
    given = Operands(*tensors)
    # On meta there is no group yet.
    process_group = None if given.hidden.is_meta else resolve_group(group)
    return exchanged(given, experts, transposed, activation, ranks, process_group)


LIBRARY.define(f"exchanged_experts{OWN_SCHEMA}", tags=(torch.Tag.pt2_compliant_tag,))
LIBRARY.impl("exchanged_experts", _exchanged_experts, "CompositeImplicitAutograd")
