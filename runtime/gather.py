"""Bring whole tensors of all stages to rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.piece_name import by_whole
from autopar.runtime.ranks import Ranks


def gather_to_first(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> dict[str, torch.Tensor]:
    """Whole CPU tensors of every stage by name, on rank 0; an empty dict elsewhere.

    `tensors`: those of this rank's stage (DTensors are made whole over dp and tp). Of a name that
    several stages hold, the first stage's is taken. Pieces of one parameter come as that parameter.
    Every rank has to call this.
    """
    here = ranks.mesh.coordinates(ranks.rank)
    leads = here["dp"] == here["cp"] == here["tp"] == 0
    whole: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if leads:
            # A copy: on one dp and tp rank `value` is the memory of the program itself.
            whole[name] = value.detach().to("cpu", copy=True).contiguous()
    if not leads:
        return {}
    if ranks.rank != 0:
        kinds = [(name, tuple(t.shape), t.dtype) for name, t in whole.items()]
        dist.send_object_list([kinds], dst=0, group=ranks.control, device=torch.device("cpu"))
        for value in whole.values():
            dist.send(value, dst=0, group=ranks.control)
        return {}
    for stage in range(1, ranks.mesh.pp):
        received: list[Any] = [None]
        source = ranks.mesh.rank(pp=stage)
        dist.recv_object_list(received, src=source, group=ranks.control, device=torch.device("cpu"))
        for name, shape, dtype in received[0]:
            value = torch.empty(shape, dtype=dtype)
            dist.recv(value, src=source, group=ranks.control)
            whole.setdefault(name, value)
    return joined(whole)


def joined(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pieces of parameters put together under the names of the user's model."""
    found = dict(tensors)
    for name, pieces in by_whole(tensors).items():
        found[name] = torch.cat([found.pop(str(p)) for p in pieces], pieces[0].dim)
    return found
