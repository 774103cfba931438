"""Keeps the copies of an expert alike: each gets the sum of the gradients of all, once a step.

    slots of rank 0: e0, e1, e3     rank 1: e2, e3     (e3 of rank 0 is its home)

    rank 1 sends its gradient of e3, rank 0 adds it to its own, and sends the sum back

Copies begin equal, and equal gradients and states keep them so. In norms the home alone counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.runtime.expert_load import LayerExperts
from autopar.runtime.ranks import Ranks
from autopar.runtime.slot_exchange import OwnSlots, local_tensor, traded
from autopar.runtime.slot_order import EMPTY, has_copies, home_slots

Tensor = torch.Tensor


@dataclass(frozen=True)
class _Ways:
    """Of one layer and rank: its slots with copies whose home is on another rank or slot (`away`),
    in the order of the ranks of their homes, `sent[r]` of them to rank r; and its slots that are
    home to copies (`home`), `received[r]` times from rank r."""

    away: tuple[int, ...]
    sent: tuple[int, ...]
    home: tuple[int, ...]
    received: tuple[int, ...]

    @staticmethod
    def of(layer: LayerExperts, homes: Sequence[int], here: int) -> _Ways:
        count, own = layer.ranks, layer.own
        # (slot, slot of its home) of every copy but homes, in the order of ranks.
        others = [(s, homes[e]) for s, e in enumerate(layer.order) if e != EMPTY and homes[e] != s]
        leave = sorted((h // own, s % own) for s, h in others if s // own == here)
        comes = [(s // own, h % own) for s, h in others if h // own == here]
        return _Ways(
            tuple(slot for _, slot in leave),
            tuple(sum(rank == r for rank, _ in leave) for r in range(count)),
            tuple(slot for _, slot in comes),
            tuple(sum(rank == r for rank, _ in comes) for r in range(count)),
        )


class ExpertCopies:
    """Of the layers of all stages of this rank; `parameters`: theirs, by name."""

    def __init__(
        self,
        layers: Sequence[LayerExperts],
        parameters: Mapping[str, nn.Parameter],
        ranks: Ranks,
    ) -> None:
        self._ranks = ranks
        copied = [layer for layer in layers if layer.spare and has_copies(layer.order)]
        self._layer_of = {parameters[name]: x for x in copied for name in x.parameters}
        self._homes = {x.layer: home_slots(x.order, x.ranks) for x in copied}
        self._ways = {
            x.layer: _Ways.of(x, self._homes[x.layer], ranks.index(x.axis)) for x in copied
        }

    @torch.no_grad()
    def sum_gradients(self) -> None:
        """Of the step that just ended; all ranks of a stage together."""
        for parameter, layer in self._layer_of.items():
            if parameter.grad is not None:
                self._sum(parameter.grad, layer)

    def _sum(self, gradient: Tensor, layer: LayerExperts) -> None:
        axis, ranks, way = layer.axis, self._ranks, self._ways[layer.layer]
        local, held = local_tensor(gradient), OwnSlots.of(gradient, layer.own, axis)
        came = traded(held.rows(local, way.away), way.sent, way.received, axis, ranks)
        held.add(local, way.home, came)
        back = traded(held.rows(local, way.home), way.received, way.sent, axis, ranks)
        held.put(local, way.away, back)

    def counted(self, parameter: nn.Parameter, norm_type: float) -> Tensor | None:
        """The gradient as a norm counts it: without copies beyond the first."""
        gradient = parameter.grad
        layer = self._layer_of.get(parameter)
        # The largest element is the same with copies, and a tensor without any has none.
        if gradient is None or layer is None or norm_type == float("inf"):
            return gradient
        assert isinstance(gradient, DTensor)
        here = self._ranks.index(layer.axis)
        homes = sum(slot // layer.own == here for slot in self._homes[layer.layer])
        held = OwnSlots.of(gradient, layer.own, layer.axis)
        local = local_tensor(gradient)[: max(0, homes - held.start)]
        # Any: the constructor has no annotations. Homes are a rank's first slots; that fewer rows
        # are here than the spec says makes no difference to a norm.
        make: Any = DTensor
        found: Tensor = make(local, gradient._spec, requires_grad=False)
        return found
