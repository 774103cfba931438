"""Price of a rewritten block: walk its local graph, op by op and collective by collective.

This does not look at the placement problem: it prices the graph that a rank will run. The search's
own objective must agree with it (`autopar.workflow.model_costs` asserts that for every block).
"""

from __future__ import annotations

from torch import fx

from autopar.block_cost import BlockCost
from autopar.cost.collective import collective_time
from autopar.parts import Slot
from autopar.passes.analysis.block_memory import block_memory
from autopar.passes.analysis.roofline import roofline
from autopar.passes.analysis.strategies import Axis
from autopar.program import outputs_of, tensors_of


def communication(graph: fx.GraphModule, axis: Axis) -> tuple[float, float]:
    """Seconds of the inserted collectives, forward and backward."""
    forward = backward = 0.0
    for node in graph.graph.nodes:
        edge = node.meta.get("reshard")
        if edge is None:
            continue
        value = tensors_of(node.meta["val"])[0]
        count = 1
        for size in node.meta["global_shape"]:
            count *= size
        nbytes = count * value.element_size()
        grad = bool(node.meta.get("requires_grad"))
        forward += _seconds(edge.forward, nbytes, axis)
        backward += _seconds(edge.backward, nbytes, axis) if grad else 0.0
    return forward, backward


def _seconds(kind: str, nbytes: int, axis: Axis) -> float:
    return collective_time(kind, nbytes, axis.ranks, axis.stride, axis.cluster) if kind else 0.0


def block_cost(
    name: str, kind: str, graph: fx.GraphModule, slots: tuple[Slot, ...], axis: Axis, tied: set[str]
) -> BlockCost:
    """Price on one rank for one micro-batch. `tied`: parameters that other blocks hold too."""
    prices = roofline(graph, axis)
    forward_comm, backward_comm = communication(graph, axis)
    parameters = trainable = shared_elements = late = 0
    late_seconds = 0.0
    placeholders = graph.graph.find_nodes(op="placeholder")
    for node, slot in zip(placeholders, slots, strict=True):
        if slot.kind != "parameter":
            continue
        count = node.meta["val"].numel()
        parameters += count
        trainable += count if node.meta.get("requires_grad") else 0
        shared_elements += count if slot.name in tied else 0
        if node.meta["placement"].gradient_is_partial:
            late += count * node.meta["val"].element_size()
    if late:
        late_seconds = _seconds("all_reduce", late, axis)
    memory = block_memory(graph, slots)
    outputs = [n.meta["val"] for n in outputs_of(graph.graph)]
    return BlockCost(
        name=name,
        kind=kind,
        forward_compute=sum(p.cost.forward_seconds for p in prices),
        backward_compute=sum(p.cost.backward_seconds for p in prices),
        forward_comm=forward_comm,
        backward_comm=backward_comm,
        flops=sum(p.cost.forward_flops + p.cost.backward_flops for p in prices),
        parameters=parameters,
        trainable=trainable,
        saved_bytes=memory.saved,
        input_bytes=memory.inputs,
        transient_bytes=memory.transient + memory.shared,
        boundary_bytes=sum(v.nbytes for v in outputs if v.dim()),
        parameter_reduce_seconds=late_seconds,
        tied_parameters=shared_elements,
    )
