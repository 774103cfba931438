"""Counts, while a program runs, how many rows each expert of a layer gets.

A block with experts also returns which experts were chosen; after the block's forward the choices
are added to a counter on the device, so that nothing waits for it, and what runs again in the
backward is not counted twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from autopar.experts.grouped_matmul import has_values
from autopar.experts.load import LayerLoad
from autopar.runtime.ranks import Ranks

Tensor = torch.Tensor


@dataclass
class LayerExperts:
    """A layer's experts on this rank, and the rows that each got so far.

    `split`: tp ranks have different tokens; `ranks`: over how many of them the experts are split.
    `parameters`: those that hold the experts, and nothing else; none when that is not so.
    `order`: expert by slot, where experts were moved; rank r has the r-th part of the slots.
    """

    layer: str
    experts: int
    split: bool
    ranks: int
    parameters: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    counts: Tensor | None = field(default=None, repr=False)

    def add(self, index: Tensor) -> None:
        """Nothing for an index without values, as in a dry run."""
        if not has_values(index):
            return
        if self.counts is None:
            self.counts = torch.zeros(self.experts, dtype=torch.int64, device=index.device)
        flat = index.detach().reshape(-1)
        # Not `bincount`, which waits for the greatest number.
        self.counts.scatter_add_(0, flat, self.counts.new_ones(()).expand(flat.shape))

    def reset(self) -> None:
        self.counts = None


def summed_load(stages: Mapping[int, Sequence[LayerExperts]], ranks: Ranks) -> dict[str, LayerLoad]:
    """What all ranks counted, by layer in the order of the stages; the same on every rank.

    Every rank calls this with the layers of each of its stages, by index of the stage.
    """
    own = [layer for layers in stages.values() for layer in layers]
    here = ranks.mesh.coordinates(ranks.rank)
    parts = [_counted(x, own_tokens=x.split or here["tp"] == 0, device=ranks.device) for x in own]
    loads: dict[str, LayerLoad] = {}
    if parts:
        total = torch.cat(parts)
        for axis in ("tp", "cp", "dp"):
            if ranks.mesh.degree(axis) > 1:
                dist.all_reduce(total, group=ranks.group(axis))
        rows = iter(total.tolist())
        for x in own:
            own_rows = tuple(next(rows) for _ in range(x.experts))
            loads[x.layer] = LayerLoad(own_rows, x.ranks, x.order)
    found = {index: [(x.layer, loads[x.layer]) for x in stages[index]] for index in stages}
    by_rank: list[dict[int, list[tuple[str, LayerLoad]]]] = [found]
    if ranks.mesh.pp > 1:
        leads = here["dp"] == here["cp"] == here["tp"] == 0
        by_rank = [{} for _ in range(ranks.mesh.size)]
        dist.all_gather_object(by_rank, found if leads else {}, group=ranks.control)
    by_stage = {index: layers for part in by_rank for index, layers in part.items()}
    return {name: load for index in sorted(by_stage) for name, load in by_stage[index]}


def _counted(layer: LayerExperts, *, own_tokens: bool, device: torch.device) -> Tensor:
    if layer.counts is None or not own_tokens:
        return torch.zeros(layer.experts, dtype=torch.int64, device=device)
    return layer.counts
