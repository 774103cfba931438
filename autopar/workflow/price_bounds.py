"""Lower bounds on the price of a block before it is placed: what lets the search skip it."""

from __future__ import annotations

from dataclasses import replace

from autopar.block_cost import BlockCost, Experts
from autopar.cluster import Device
from autopar.workflow.block_kinds import Kind


def block_bound(whole: BlockCost, kind: Kind, tp: int, device: Device) -> BlockCost:
    """Every op with its fastest strategy over `tp` ranks and no communication; a tp-th part of all
    memory of the `whole` block."""
    forward = backward = 0.0
    found = kind.over(tp)
    for node in found.calls:
        prices = [p.cost for p in found.prices(node, device)]
        forward += min(p.forward_seconds for p in prices)
        backward += min(p.backward_seconds for p in prices)
    return replace(
        whole,
        forward_compute=forward,
        backward_compute=backward,
        forward_comm=0.0,
        backward_comm=0.0,
        # Split evenly or not at all, so rounding up is no less a bound, and some is never none.
        parameters=-(-whole.parameters // tp),
        trainable=-(-whole.trainable // tp),
        shapes=(),
        saved_bytes=whole.saved_bytes // tp,
        input_bytes=whole.input_bytes // tp,
        transient_bytes=0,
        reduced_transient_bytes=0,
        largest_parameter=0,
        boundary_bytes=whole.boundary_bytes // tp,
        backward_weights=0.0,
        forward_ep=0.0,
        backward_ep=0.0,
        experts=Experts(whole.experts.parameters // tp, whole.experts.trainable // tp),
        parameter_reduce_seconds=0.0,
        tied=tuple(
            replace(t, parameters=t.parameters // tp, trainable=t.trainable // tp, shapes=())
            for t in whole.tied
        ),
        partial=tuple(
            replace(o, compute=0.0, comm=0.0, kept=o.kept // tp, rebuilt=0)
            for o in whole.partial[-1:]
        ),
    )


def part_of_sequence(block: BlockCost, cp: int) -> BlockCost:
    """A bound for one of `cp` ranks: a part of the time and of the activations, all parameters."""
    return replace(
        block,
        forward_compute=block.forward_compute / cp,
        backward_compute=block.backward_compute / cp,
        saved_bytes=block.saved_bytes // cp,
        input_bytes=block.input_bytes // cp,
        boundary_bytes=block.boundary_bytes // cp,
        partial=tuple(replace(o, kept=o.kept // cp) for o in block.partial),
    )


def only_seconds(floor: BlockCost, seconds: float) -> BlockCost:
    """`floor` with all its time as one sum."""
    return replace(floor, forward_compute=seconds, backward_compute=0.0)
