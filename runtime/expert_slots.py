"""Moves the experts of a layer between the ranks that they are split over, between two steps.

A rank's part of a parameter [e, …] are slots. At first slot s holds expert s, or the experts of a
rank have its first slots where the plan has room for more (`spare_experts`); afterwards slot s
holds `order[s]`, and the block's graph turns the router's choices into slots. What leaves the
program (state, gradients) is put back in the order of experts, one of each, so that a checkpoint
does not know of slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from autopar.errors import UsageError
from autopar.experts.assignment import Assignment
from autopar.runtime.expert_load import LayerExperts
from autopar.runtime.live_optimizers import live_optimizers
from autopar.runtime.ranks import Ranks, together
from autopar.runtime.slot_exchange import local_tensor, moved
from autopar.runtime.slot_order import EMPTY, Order, home_slots, natural_order, slot_order

Tensor = torch.Tensor


class ExpertSlots:
    """The layers with experts of all stages of this rank.

    `reads`: the parameters of each of its blocks, and those that other stages hold too.
    """

    def __init__(
        self, layers: Sequence[LayerExperts], reads: Iterable[Sequence[str]], ranks: Ranks
    ) -> None:
        self.layers = layers
        self._ranks = ranks
        self._layer_of = {name: layer for layer in layers for name in layer.parameters}
        times: dict[str, int] = {}
        for block in reads:
            for name in dict.fromkeys(block):
                times[name] = times.get(name, 0) + 1
        self._shared = {name for name, count in times.items() if count > 1}
        for layer in layers:
            if layer.spare:
                layer.order = natural_order(layer.experts, layer.ranks, layer.spare)
                layer.turn = _turn(layer, ranks)

    @property
    def roomy(self) -> bool:
        """Whether a layer has more slots than experts."""
        return any(layer.spare for layer in self.layers)

    # What leaves and enters.

    def by_expert(self, name: str, value: Any) -> Any:
        """A parameter, or what is laid out as it, in the order of experts; itself if it is."""
        layer = self._moved_layer(name, value)
        if layer is None:
            return value
        return self._replaced(layer, value, home_slots(layer.order, layer.ranks), layer.own)

    def by_slot(self, name: str, value: Any) -> Any:
        """The reverse of `by_expert`."""
        layer = self._moved_layer(name, value)
        if layer is None:
            return value
        return self._replaced(layer, value, layer.order, layer.experts // layer.ranks)

    def of_state(
        self, state: Mapping[str, Any], change: Callable[[str, Any], Any]
    ) -> dict[str, Any]:
        """`by_expert` or `by_slot` of the entries `state.NAME.KEY` of an optimizer's state."""
        found = dict(state)
        for name, layer in self._layer_of.items():
            prefix = f"state.{name}."
            for key in (k for k in state if layer.order and k.startswith(prefix)):
                value = state[key]
                if layer.spare and isinstance(value, Tensor) and value.dim():
                    _check_layout(name, key[len(prefix) :], value, isinstance(value, DTensor))
                found[key] = change(name, value)
        return found

    def _replaced(self, layer: LayerExperts, tensor: DTensor, source: Order, own: int) -> Tensor:
        """A new tensor whose slot s is slot `source[s]` of the old one, with `own` on a rank."""
        shape = torch.Size((len(source), *tensor.shape[1:]))
        made: Tensor = DTensor.from_local(
            moved(tensor, source, own, layer.axis, self._ranks),
            tensor.device_mesh,
            tensor.placements,
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        return made

    def _moved_layer(self, name: str, value: Any) -> LayerExperts | None:
        layer = self._layer_of.get(name)
        of_experts = isinstance(value, torch.Tensor) and value.dim() > 0
        return layer if layer is not None and layer.order and of_experts else None

    # The move.

    def agreed_orders(
        self,
        assignment: Assignment,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
    ) -> dict[str, Order]:
        """`orders` of rank 0's assignment, when all ranks can move to them; else all raise."""
        given = [assignment]
        dist.broadcast_object_list(given, src=0, group=self._ranks.control)
        assignment = given[0]
        orders: dict[str, Order] = {}
        error: Exception | None = None
        try:
            orders = self.orders(assignment)
            if optimizer is not None:
                self.check_optimizer(optimizer, parameters)
            self._check_others(orders, optimizer, parameters)
        except Exception as found:
            error = found
        together(self._ranks, error)
        told: list[Any] = [None] * self._ranks.mesh.size
        mine = [layer.layer for layer in self.layers]
        dist.all_gather_object(told, mine, group=self._ranks.control)
        known = {name for layers in told for name in layers}
        unknown = [name for name in assignment.layers if name not in known]
        if unknown:
            raise UsageError(
                f"the assignment has layer {unknown[0]!r}, the program has not",
                next_step=f"its layers with experts are {', '.join(sorted(known)[:4]) or 'none'}",
            )
        return orders

    def orders(self, assignment: Assignment) -> dict[str, Order]:
        """The new order of each layer of this rank's stages that the assignment has.

        Raises `UsageError` for what can't be executed, naming the layer.
        """
        found = {}
        for layer in self.layers:
            if layer.layer in assignment.layers:
                holders = assignment.layers[layer.layer].holders
                self._check(layer, holders, assignment.ranks)
                found[layer.layer] = slot_order(holders, layer.ranks, layer.own)
        return found

    def _check(self, layer: LayerExperts, holders: Sequence[Sequence[int]], ranks: int) -> None:
        name = layer.layer
        if layer.ranks == 1:
            raise UsageError(
                f"the plan does not split the experts of layer {name!r} over ranks",
                next_step="plan with experts split (expert-parallel), or leave the layer out",
            )
        if ranks != layer.ranks:
            raise UsageError(
                f"an assignment to {ranks} ranks: layer {name!r} is split over {layer.ranks}",
                next_step=f"give autopar.assign_experts ranks={layer.ranks}",
            )
        if len(holders) != layer.experts:
            raise UsageError(
                f"the assignment has {len(holders)} experts of layer {name!r}, there are "
                f"{layer.experts}",
                next_step="assign by the load of this model",
            )
        for expert, held in enumerate(holders):
            if not held or len(set(held)) < len(held) or not set(held) <= set(range(ranks)):
                raise UsageError(
                    f"the assignment has expert {expert} of layer {name!r} on ranks {list(held)} "
                    f"of {ranks}",
                    next_step="give each expert one or more ranks, each of them once",
                )
        if not layer.parameters or self._shared & set(layer.parameters):
            raise UsageError(
                f"other parts of the model read the experts of layer {name!r}",
                next_step="leave the layer out of the assignment",
            )
        _check_room(layer, holders)

    def check_optimizer(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """Raises `UsageError` for a state that is not laid out as its parameter."""
        for name in self._layer_of:
            for key, value in optimizer.state.get(parameters[name], {}).items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    continue
                alike = isinstance(value, DTensor) and value.shape == parameters[name].shape
                _check_layout(name, f"{key} of {type(optimizer).__name__}", value, alike)

    def _check_others(
        self,
        orders: Mapping[str, Order],
        given: torch.optim.Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """Raises `UsageError` for states that would stay behind when their experts are moved."""
        moving = [x for x in self.layers if orders.get(x.layer, _now(x)) != _now(x)]
        if not moving:
            return
        others = live_optimizers([parameters[n] for x in moving for n in x.parameters], given)
        if others:
            layers = ", ".join(repr(x.layer) for x in moving[:2])
            raise UsageError(
                f"{type(others[0]).__name__} has states of experts that move ({layers}), and is "
                "not given: they would stay behind, with other experts",
                next_step="give it: program.rebalance(assignment, optimizer); or delete it"
                if given is None
                else "have one optimizer for all experts, or delete those that are not used",
            )

    def move(
        self,
        orders: Mapping[str, Order],
        parameters: Mapping[str, nn.Parameter],
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        """Weights, gradients and the optimizer's state, in place; all ranks of a stage together."""
        for layer in self.layers:
            order = orders.get(layer.layer)
            now = _now(layer)
            if order is None or order == now:
                continue
            slot_of = home_slots(now, layer.ranks)
            source = tuple(slot_of[expert] if expert != EMPTY else EMPTY for expert in order)
            for name in layer.parameters:
                parameter = parameters[name]
                state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
                kept = [v for v in state.values() if isinstance(v, DTensor) and v.dim()]
                for tensor in (parameter, parameter.grad, *kept):
                    if tensor is not None:
                        made = moved(tensor, source, layer.own, layer.axis, self._ranks)
                        local_tensor(tensor).copy_(made)
            natural = not layer.spare and order == tuple(sorted(order))
            layer.order = () if natural else order


def _now(layer: LayerExperts) -> Order:
    """The expert of every slot."""
    return layer.order or tuple(range(layer.experts))


def _check_room(layer: LayerExperts, holders: Sequence[Sequence[int]]) -> None:
    """No rank is given more than its slots; and all of them without spare slots."""
    counts = [sum(rank in held for held in holders) for rank in range(layer.ranks)]
    fullest, even = max(counts), layer.experts // layer.ranks
    if fullest <= layer.own:
        return
    copies = sum(counts) > layer.experts
    what = f"with copies gives ranks {counts}" if copies else f"gives ranks {counts}"
    raise UsageError(
        f"the assignment of layer {layer.layer!r} {what} experts: its {layer.ranks} ranks have "
        f"{layer.own} slots each",
        next_step=f"plan with spare_experts={fullest - even}, or assign with most={layer.own}"
        + (" or fewer replicas" if copies else ""),
    )


def _check_layout(name: str, state: str, value: Tensor, alike: bool) -> None:
    if not alike:
        raise UsageError(
            f"state {state} is not laid out as its parameter {name!r}: it can't be moved with its "
            "expert",
            next_step="use an optimizer with states for each element, as AdamW",
        )


def _turn(layer: LayerExperts, ranks: Ranks) -> int:
    """Another number for each of the ranks whose tokens differ."""
    place = ranks.mesh.replica(ranks.rank)
    return place + ranks.index("tp") * ranks.mesh.replicas if layer.split else place
