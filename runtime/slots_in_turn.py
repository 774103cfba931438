"""Sends the choices of an expert that has copies to one of them after the other.

slots_in_turn(index[t, k], slots[e, c], copies[e], first)   ->   [t, k]

The n-th choice of expert e, counted in the order of tokens, goes to slot
`slots[e, (first + n) % copies[e]]`: copies get equally many rows, up to one. Ranks whose tokens
differ start with another copy (`first`), so that what does not divide falls on no copy in
particular. Nothing waits for the device.
"""

from __future__ import annotations

import torch

from autopar.runtime.op_library import LIBRARY

Tensor = torch.Tensor


def _slots_in_turn(index: Tensor, slots: Tensor, copies: Tensor, first: int) -> Tensor:
    expert, order = torch.sort(index.reshape(-1), stable=True)
    before = torch.searchsorted(expert, expert)
    place = torch.arange(expert.shape[0], device=index.device) - before
    found = torch.empty_like(expert)
    found[order] = slots[expert, (place + first) % copies[expert]]
    return found.view_as(index)


LIBRARY.define(
    "slots_in_turn(Tensor index, Tensor slots, Tensor copies, int first) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
LIBRARY.impl("slots_in_turn", _slots_in_turn, "CompositeImplicitAutograd")
