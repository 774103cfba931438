"""Price of a rewritten block: walk its local graph, op by op and collective by collective.

This does not look at the placement problem: it prices the graph that a rank will run. The search's
own objective must agree with it (`autopar.workflow.model_costs` asserts that for every block).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from torch import fx

from autopar.axis import Axis
from autopar.block_cost import BlockCost, Experts, Tied
from autopar.cost.collective import collective_time
from autopar.experts.spare_slots import spare_holders
from autopar.mesh import EP
from autopar.parts import Slot
from autopar.passes.analysis.block_memory import block_memory
from autopar.passes.analysis.recompute_frontier import recompute_frontier
from autopar.passes.analysis.roofline import COMMUNICATION, roofline
from autopar.program import outputs_of


def _seconds(kind: str, nbytes: int, axis: Axis) -> float:
    return collective_time(kind, nbytes, axis.ranks, axis.stride, axis.cluster) if kind else 0.0


class _Held(NamedTuple):
    """Parameters of one rank in elements; `late`: bytes of those whose gradient waits for a sum."""

    parameters: int
    trainable: int
    largest: int
    last: int
    late: int
    tied: tuple[Tied, ...]
    shapes: tuple[tuple[int, ...], ...]
    experts: Experts
    spare_over_tp: int


def _room(
    graph: fx.GraphModule, slots: tuple[Slot, ...], tied: Mapping[str, str], spare: int
) -> dict[fx.Node, int]:
    """Elements of spare slots, of the parameters that have them."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    pairs = zip(placeholders, slots, strict=True)
    elsewhere = {node for node, slot in pairs if slot.name in tied}
    found = spare_holders(graph, elsewhere) if spare else []
    return {node: spare * node.meta["val"][0].numel() for node in found}


def _held(
    graph: fx.GraphModule,
    slots: tuple[Slot, ...],
    tied: Mapping[str, str],
    room: Mapping[fx.Node, int],
) -> _Held:
    parameters = trainable = late = largest = last = over_tp = 0
    shared: dict[str, Tied] = {}
    shapes: list[tuple[int, ...]] = []
    experts = Experts()
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node, slot in zip(placeholders, slots, strict=True):
        if slot.kind != "parameter":
            continue
        shape = tuple(map(int, node.meta["val"].shape))
        count = node.meta["val"].numel() + room.get(node, 0)
        if node in room:
            shape = (count // prod(shape[1:]), *shape[1:])
        parameters += count
        trained = count if node.meta.get("requires_grad") else 0
        own = (shape,) if trained else ()
        shapes += own
        trainable += trained
        largest = max(largest, trained)
        last = trained if trained and slot.name not in tied else last
        spare = room.get(node, 0) if trained else 0
        if node.meta.get(EP):
            shaped = experts.shapes + own
            sums = experts.parameters + count, experts.trainable + trained
            experts = Experts(*sums, shaped, experts.spare + spare)
        else:
            over_tp += spare
        if slot.name in tied:
            group = tied[slot.name]
            known = shared.get(group, Tied(group, 0, 0))
            shared[group] = Tied(
                group, known.parameters + count, known.trainable + trained, known.shapes + own
            )
        if node.meta["placement"].gradient_is_partial:
            late += count * node.meta["val"].element_size()
    held = tuple(shared.values())
    shaped = tuple(sorted(shapes))
    return _Held(parameters, trainable, largest, last, late, held, shaped, experts, over_tp)


def block_cost(
    name: str,
    kind: str,
    graph: fx.GraphModule,
    slots: tuple[Slot, ...],
    axis: Axis,
    tied: Mapping[str, str],
    spare_experts: int = 0,
) -> BlockCost:
    """Price on one rank for one micro-batch. `tied`: parameter that other blocks hold too -> its
    group. `spare_experts`: slots that a rank has beyond its part of a layer's experts."""
    found = roofline(graph, axis)
    prices = [p.cost for p in found]
    on_cp, on_ep = ([p.cost for p in found if p.axis == on] for on in ("cp", EP))
    ops = [p for p in prices if p.bound != COMMUNICATION]
    moves = [p for p in prices if p.bound == COMMUNICATION]
    room = _room(graph, slots, tied, spare_experts)
    held = _held(graph, slots, tied, room)
    memory = block_memory(graph, slots, room)
    outputs = [n.meta["val"] for n in outputs_of(graph.graph)]
    return BlockCost(
        name=name,
        kind=kind,
        forward_compute=sum(p.forward_seconds for p in ops),
        backward_compute=sum(p.backward_seconds for p in ops),
        backward_weights=sum(p.weight_seconds for p in ops),
        forward_comm=sum(p.forward_seconds for p in moves),
        backward_comm=sum(p.backward_seconds for p in moves),
        forward_cp=sum(p.forward_seconds for p in on_cp),
        backward_cp=sum(p.backward_seconds for p in on_cp),
        forward_ep=sum(p.forward_seconds for p in on_ep),
        backward_ep=sum(p.backward_seconds for p in on_ep),
        hidden_ep=sum(p.hidden for p in found if p.axis == EP),
        flops=sum(p.forward_flops + p.backward_flops for p in ops),
        parameters=held.parameters,
        trainable=held.trainable,
        saved_bytes=memory.saved,
        input_bytes=memory.inputs,
        transient_bytes=memory.transient + memory.shared,
        reduced_transient_bytes=memory.reduced_transient + memory.shared,
        reduced_gradient_bytes=memory.made,
        largest_parameter=held.largest,
        last_parameter=held.last,
        saved_input_bytes=memory.saved_inputs,
        released_bytes=memory.released,
        forward_transient_bytes=memory.forward_transient + memory.shared,
        fleeting_bytes=memory.fleeting,
        shared_bytes=memory.shared,
        shared_kept_bytes=memory.shared_kept,
        delayed_bytes=memory.divided.delayed,
        divided_transient_bytes=memory.divided.most,
        loose_bytes=memory.divided.loose,
        boundary_bytes=sum(v.nbytes for v in outputs if v.dim()),
        parameter_reduce_seconds=_seconds("all_reduce", held.late, axis) if held.late else 0.0,
        tied=held.tied,
        shapes=held.shapes,
        experts=held.experts,
        spare_over_tp=held.spare_over_tp,
        partial=recompute_frontier(graph, slots, axis, memory.reduced_transient),
    )
