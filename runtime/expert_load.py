"""Counts, while a program runs, how many rows each expert of a layer gets.

A block with experts also returns which experts were chosen; after the block's forward the choices
are added to a counter on the device, so that nothing waits for it, and what runs again in the
backward is not counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import torch
import torch.distributed as dist

from autopar.experts.grouped_matmul import has_values
from autopar.experts.load import LayerLoad
from autopar.runtime.ranks import Ranks

Tensor = torch.Tensor


@dataclass
class LayerExperts:
    """A layer's experts on this rank, and the rows that each got so far.

    `split`: tp ranks have different tokens; `ranks`: over how many of `axis` (tp or ep) the experts
    are split.
    `parameters`: those that hold the experts, and nothing else; none when that is not so.
    `limited`: rows may be dropped, which are counted behind those of the experts. `order`: expert
    by slot, where experts were moved; rank r has the r-th part of the slots. `spare`: slots that a
    rank has beyond its part of the experts; `turn`: with which copy of an expert this rank begins.
    """

    layer: str
    experts: int
    split: bool
    ranks: int
    parameters: tuple[str, ...] = ()
    order: tuple[int, ...] = ()
    axis: str = "tp"
    limited: bool = False
    spare: int = 0
    turn: int = 0
    counts: Tensor | None = field(default=None, repr=False)

    def add(self, index: Tensor) -> None:
        """Nothing for an index without values, as in a dry run."""
        if not has_values(index):
            return
        if self.counts is None:
            self.counts = torch.zeros(self.places, dtype=torch.int64, device=index.device)
        flat = index.detach().reshape(-1).to(torch.int64)
        # Not `bincount`, which waits for the greatest number.
        self.counts.scatter_add_(0, flat, self.counts.new_ones(()).expand(flat.shape))

    @property
    def places(self) -> int:
        """How many numbers a choice may be."""
        return self.experts + self.limited

    @property
    def own(self) -> int:
        """Slots of a rank."""
        return self.experts // self.ranks + self.spare

    def reset(self) -> None:
        self.counts = None


def summed_load(stages: Mapping[int, Sequence[LayerExperts]], ranks: Ranks) -> dict[str, LayerLoad]:
    """What all ranks counted, by layer in the order of the stages; the same on every rank.

    Every rank calls this with the layers of each of its stages, by index of the stage.
    """
    own = [layer for layers in stages.values() for layer in layers]
    here = ranks.mesh.coordinates(ranks.rank)
    parts = [_counted(x, own_tokens=x.split or here["tp"] == 0, device=ranks.device) for x in own]
    rows: list[int] = []
    if parts:
        total = torch.cat(parts)
        for axis in ("tp", "cp", "dp"):
            if ranks.mesh.degree(axis) > 1:
                dist.all_reduce(total, group=ranks.group(axis))
        rows = total.tolist()
    counted = iter(rows)
    found = {
        index: [
            (
                x.layer,
                LayerLoad(
                    tuple(islice(counted, x.experts)),
                    x.ranks,
                    x.order,
                    next(counted) if x.limited else 0,
                ),
            )
            for x in layers
        ]
        for index, layers in stages.items()
    }
    by_rank: list[dict[int, list[tuple[str, LayerLoad]]]] = [found]
    if ranks.mesh.pp > 1:
        leads = here["dp"] == here["cp"] == here["tp"] == 0
        by_rank = [{} for _ in range(ranks.mesh.size)]
        dist.all_gather_object(by_rank, found if leads else {}, group=ranks.control)
    by_stage = {index: layers for part in by_rank for index, layers in part.items()}
    return _by_name(item for index in sorted(by_stage) for item in by_stage[index])


def _by_name(items: Iterable[tuple[str, LayerLoad]]) -> dict[str, LayerLoad]:
    """A layer that the model calls several times is one."""
    found: dict[str, LayerLoad] = {}
    for name, load in items:
        if name in found:
            rows = zip(found[name].rows, load.rows, strict=True)
            dropped = found[name].dropped + load.dropped
            load = replace(load, rows=tuple(a + b for a, b in rows), dropped=dropped)
        found[name] = load
    return found


def _counted(layer: LayerExperts, *, own_tokens: bool, device: torch.device) -> Tensor:
    if layer.counts is None or not own_tokens:
        return torch.zeros(layer.places, dtype=torch.int64, device=device)
    return layer.counts
