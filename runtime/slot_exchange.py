"""Rows of a tensor [slots, …] moved between the ranks that a layer's experts are split over.

Every rank of `axis` has as many slots as the next; within that ZeRO may have given every rank of a
group a part of these (of dim 0), or a part of each (of another dim).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from autopar.mesh import EP
from autopar.runtime.ranks import Ranks
from autopar.runtime.torch_compat import all_gather_single

Tensor = torch.Tensor


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, to be read and written past autograd."""
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor.detach()


@dataclass(frozen=True)
class OwnSlots:
    """The `count` slots of this rank of the axis; of a tensor it has those from `start` up to
    `stop`, the ranks of `group` (None: it alone) all."""

    count: int
    start: int
    stop: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(tensor: Tensor, count: int, axis: str) -> OwnSlots:
        assert isinstance(tensor, DTensor)
        # What is split over ep lies on a mesh of ep and tp, all else on one of tp; FSDP2 puts its
        # own dims first. Its `_StridedShard`, where both split the same dim, is no `Shard`.
        inner = 2 if axis == EP else 1
        for place, placement in enumerate(tensor.placements[:-inner]):
            if getattr(placement, "dim", None) == 0 and tensor.device_mesh.size(place) > 1:
                group = tensor.device_mesh.get_group(place)
                each = -(-count // group.size())
                start = min(count, each * group.rank())
                return OwnSlots(count, start, min(count, start + each), group)
        return OwnSlots(count, 0, count, None)

    def gathered(self, local: Tensor) -> Tensor:
        """Rows of all `count` slots."""
        if self.group is None:
            return local
        each = -(-self.count // self.group.size())
        padded = local.new_zeros((each, *local.shape[1:]))
        padded[: local.shape[0]] = local
        whole = local.new_empty((each * self.group.size(), *local.shape[1:]))
        all_gather_single(whole, padded, group=self.group)
        return whole[: self.count]

    def rows(self, local: Tensor, slots: Sequence[int]) -> Tensor:
        """Rows of some of the slots."""
        if self.group is None:
            return local[torch.tensor(slots, device=local.device, dtype=torch.int64)]
        found = local.new_zeros((len(slots), *local.shape[1:]))
        for place, slot in enumerate(slots):
            if self.start <= slot < self.stop:
                found[place] = local[slot - self.start]
        if slots:
            dist.all_reduce(found, group=self.group)
        return found

    def add(self, local: Tensor, slots: Sequence[int], rows: Tensor) -> None:
        """One after the other: equal ranks come to equal sums."""
        for slot, row in zip(slots, rows, strict=True):
            if self.start <= slot < self.stop:
                local[slot - self.start] += row

    def put(self, local: Tensor, slots: Sequence[int], rows: Tensor) -> None:
        for slot, row in zip(slots, rows, strict=True):
            if self.start <= slot < self.stop:
                local[slot - self.start] = row


def moved(tensor: Tensor, source: Sequence[int], own: int, axis: str, ranks: Ranks) -> Tensor:
    """This rank's part of a tensor whose slot s is slot `source[s]` of `tensor`, of which every
    rank has `own`; zeros where that is negative."""
    here = OwnSlots.of(tensor, own, axis)
    rows = exchanged(here.gathered(local_tensor(tensor)), source, axis, ranks)
    there = OwnSlots.of(tensor, len(source) // ranks.mesh.degree(axis), axis)
    return rows[there.start : there.stop]


def exchanged(rows: Tensor, source: Sequence[int], axis: str, ranks: Ranks) -> Tensor:
    """`rows`: those of all slots of this rank of the axis; the result likewise."""
    own, here, count = rows.shape[0], ranks.index(axis), ranks.mesh.degree(axis)
    new = len(source) // count
    wanted = source[here * new : (here + 1) * new]
    # Rows arrive by the rank they come from.
    filled = [i for i, slot in enumerate(wanted) if slot >= 0]
    arrival = sorted(filled, key=lambda i: (wanted[i] // own, i))
    parts = [source[r * new : (r + 1) * new] for r in range(count)]
    sent = [[slot % own for slot in part if slot >= 0 and slot // own == here] for part in parts]
    order = torch.tensor([s for each in sent for s in each], device=rows.device, dtype=torch.int64)
    counts = [sum(wanted[i] // own == r for i in filled) for r in range(count)]
    came = traded(rows[order].contiguous(), [len(s) for s in sent], counts, axis, ranks)
    result = rows.new_zeros((new, *rows.shape[1:]))
    result[torch.tensor(arrival, device=rows.device, dtype=torch.int64)] = came
    return result


def traded(
    rows: Tensor, sent: Sequence[int], received: Sequence[int], axis: str, ranks: Ranks
) -> Tensor:
    """`sent[r]` rows to rank r of the axis, in order; those that come, by rank."""
    came = rows.new_empty((sum(received), *rows.shape[1:]))
    group = ranks.group(axis)
    dist.all_to_all_single(came, rows.contiguous(), list(received), list(sent), group=group)
    return came
