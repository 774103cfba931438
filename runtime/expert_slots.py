"""Moves the experts of a layer between the ranks that they are split over, between two steps.

A rank's part of a parameter [e, …] are slots. At first slot s holds expert s; afterwards
`order[s]`, and the block's graph turns the router's choices into slots. What leaves the program
(state, gradients) is put back in the order of experts, so that a checkpoint does not know of slots.
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
from autopar.mesh import EP, EXPERT_REPLICA
from autopar.runtime.expert_load import LayerExperts
from autopar.runtime.ranks import Ranks, together
from autopar.runtime.torch_compat import all_gather_single

Tensor = torch.Tensor
Order = tuple[int, ...]


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

    # What leaves and enters.

    def by_expert(self, name: str, value: Any) -> Any:
        """A parameter, or what is laid out as it, in the order of experts; itself if it is."""
        order = self._order(name, value)
        return self._replaced(name, value, _inverse(order)) if order else value

    def by_slot(self, name: str, value: Any) -> Any:
        """The reverse of `by_expert`."""
        order = self._order(name, value)
        return self._replaced(name, value, order) if order else value

    def of_state(
        self, state: Mapping[str, Any], change: Callable[[str, Any], Any]
    ) -> dict[str, Any]:
        """`by_expert` or `by_slot` of the entries `state.NAME.KEY` of an optimizer's state."""
        found = dict(state)
        for name, layer in self._layer_of.items():
            prefix = f"state.{name}."
            for key in (k for k in state if layer.order and k.startswith(prefix)):
                found[key] = change(name, state[key])
        return found

    def _replaced(self, name: str, tensor: DTensor, source: Order) -> Tensor:
        """A new tensor whose slot s is slot `source[s]` of the old one."""
        make: Any = DTensor
        moved = _moved(tensor, source, self._layer_of[name].axis, self._ranks)
        made: Tensor = make(moved, tensor._spec, requires_grad=False)
        return made

    def _order(self, name: str, value: Any) -> Order:
        layer = self._layer_of.get(name)
        of_experts = isinstance(value, torch.Tensor) and value.dim() > 0
        return layer.order if layer is not None and of_experts else ()

    # The move.

    def agreed_orders(
        self,
        assignment: Assignment,
        optimizer: torch.optim.Optimizer | None,
        parameters: Mapping[str, nn.Parameter],
    ) -> dict[str, Order]:
        """`orders`, when all ranks can move theirs, to the same; else all raise."""
        orders: dict[str, Order] = {}
        error: Exception | None = None
        try:
            orders = self.orders(assignment)
            if optimizer is not None:
                self.check_optimizer(optimizer, parameters)
        except Exception as found:
            error = found
        together(self._ranks, error)
        told: list[Any] = [None] * self._ranks.mesh.size
        wanted = {name: layer.holders for name, layer in assignment.layers.items()}
        mine = wanted, [layer.layer for layer in self.layers]
        dist.all_gather_object(told, mine, group=self._ranks.control)
        others = [rank for rank, (given, _) in enumerate(told) if given != told[0][0]]
        if others:
            raise UsageError(
                f"ranks {others} were given another assignment than rank 0",
                next_step="assign on one rank and send it to all, or give all the same load",
            )
        known = {name for _, layers in told for name in layers}
        unknown = [name for name in wanted if name not in known]
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
                ranked = sorted((ranks[0], expert) for expert, ranks in enumerate(holders))
                found[layer.layer] = tuple(expert for _, expert in ranked)
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
        copies = [rank for each in holders for rank in each]
        if any(len(each) != 1 for each in holders):
            raise UsageError(
                f"the assignment has copies of experts of layer {name!r}: programs hold one of "
                "each",
                next_step="assign with replicas=0",
            )
        counts = [copies.count(rank) for rank in range(ranks)]
        if len(set(counts)) > 1 or sum(counts) != layer.experts:
            raise UsageError(
                f"the assignment of layer {name!r} gives ranks {counts} experts: programs hold "
                "equally many on each",
                next_step="assign without most=",
            )
        if not layer.parameters or self._shared & set(layer.parameters):
            raise UsageError(
                f"other parts of the model read the experts of layer {name!r}",
                next_step="leave the layer out of the assignment",
            )

    def check_optimizer(
        self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
    ) -> None:
        """Raises `UsageError` for a state that is not laid out as its parameter."""
        for name in self._layer_of:
            for key, value in optimizer.state.get(parameters[name], {}).items():
                if not isinstance(value, torch.Tensor) or value.dim() == 0:
                    continue
                alike = isinstance(value, DTensor) and value.shape == parameters[name].shape
                if not alike:
                    raise UsageError(
                        f"state {key!r} of {type(optimizer).__name__} is not laid out as its "
                        f"parameter {name!r}: it can't be moved with its expert",
                        next_step="use an optimizer with states for each element, as AdamW",
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
            now = layer.order or tuple(range(layer.experts))
            if order is None or order == now:
                continue
            slot_of = _inverse(now)
            source = tuple(slot_of[expert] for expert in order)
            for name in layer.parameters:
                parameter = parameters[name]
                state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
                kept = [v for v in state.values() if isinstance(v, DTensor) and v.dim()]
                for tensor in (parameter, parameter.grad, *kept):
                    if tensor is not None:
                        local = _local(tensor)
                        local.copy_(_moved(tensor, source, layer.axis, self._ranks))
            layer.order = order if order != tuple(sorted(order)) else ()


def _inverse(order: Order) -> Order:
    found = [0] * len(order)
    for slot, expert in enumerate(order):
        found[expert] = slot
    return tuple(found)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor._local_tensor.detach()


def _moved(tensor: Tensor, source: Order, axis: str, ranks: Ranks) -> Tensor:
    """This rank's part of a tensor [e, …], split over `axis` and perhaps over the ranks that hold
    the same experts within it."""
    assert isinstance(tensor, DTensor)
    local = _local(tensor)
    own = len(source) // ranks.mesh.degree(axis)
    sharded = tensor.device_mesh.mesh_dim_names or ()
    # FSDP2 puts its own axis first (`_StridedShard`, which is no `Shard`, where ep splits the same
    # dim); it may have sharded another dim than that of experts.
    first_dim = getattr(tensor.placements[0], "dim", None)
    within = len(sharded) > (2 if axis == EP else 1) and first_dim == 0
    if not within:
        return _exchanged(local, source, axis, ranks)
    group = ranks.group(EXPERT_REPLICA) if axis == EP else ranks.replicas.get_group()
    each = -(-own // group.size())
    padded = local.new_zeros((each, *local.shape[1:]))
    padded[: local.shape[0]] = local
    gathered = local.new_empty((each * group.size(), *local.shape[1:]))
    all_gather_single(gathered, padded, group=group)
    start = each * group.rank()
    moved = _exchanged(gathered[:own], source, axis, ranks)
    return moved[start : start + local.shape[0]]


def _exchanged(rows: Tensor, source: Order, axis: str, ranks: Ranks) -> Tensor:
    """Rows [e / ranks, …] of this rank of `axis` after each slot s got slot `source[s]`."""
    own, here, count = rows.shape[0], ranks.index(axis), ranks.mesh.degree(axis)
    wanted = [source[here * own + i] for i in range(own)]
    # Rows arrive by the rank they come from.
    arrival = sorted(range(own), key=lambda i: (wanted[i] // own, i))
    sent = [
        [slot % own for slot in source[r * own : (r + 1) * own] if slot // own == here]
        for r in range(count)
    ]
    order = torch.tensor([s for each in sent for s in each], device=rows.device, dtype=torch.int64)
    out = rows[order].contiguous()
    came = torch.empty_like(rows)
    counts = [sum(slot // own == r for slot in wanted) for r in range(count)]
    dist.all_to_all_single(came, out, counts, [len(s) for s in sent], group=ranks.group(axis))
    result = torch.empty_like(rows)
    result[torch.tensor(arrival, device=rows.device)] = came
    return result
