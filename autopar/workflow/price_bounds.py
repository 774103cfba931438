"""Lower bounds on the price of a block before it is placed: what lets the search skip it."""

from __future__ import annotations

from dataclasses import replace

from autopar.axis import Axis
from autopar.block_cost import BlockCost, Experts
from autopar.mesh import EP
from autopar.passes.analysis.expert_moves import exposed_moves, hidings, over_replicas
from autopar.workflow.block_kinds import Kind


def block_bound(whole: BlockCost, kind: Kind, axis: Axis) -> BlockCost:
    """Every op with its fastest strategy over the ranks of the tp `axis`, and no communication but
    what ep can't do without; a tp-th part of all memory of the `whole` block."""
    forward = backward = there = back = 0.0
    tp, found = axis.ranks, kind.over(axis.ranks)
    hidden = hidings(kind.graph, found, axis.cluster.device)
    for node, call in found.calls.items():
        priced = found.prices(node, axis.cluster.device)
        forward += min(p.cost.forward_seconds for p in priced)
        backward += min(p.cost.backward_seconds for p in priced)
        if over_replicas(call):
            moves = [exposed_moves(p.local, axis, hidden[node]) for p in priced]
            there += min(m[0] for m in moves)
            back += min(m[1] for m in moves)
    return replace(
        whole,
        forward_compute=forward,
        backward_compute=backward,
        forward_comm=there,
        backward_comm=back,
        # Split evenly or not at all, so rounding up is no less a bound, and some is never none.
        parameters=-(-whole.parameters // tp),
        trainable=-(-whole.trainable // tp),
        shapes=(),
        saved_bytes=whole.saved_bytes // tp,
        input_bytes=whole.input_bytes // tp,
        transient_bytes=0,
        reduced_transient_bytes=0,
        largest_parameter=0,
        last_parameter=0,
        boundary_bytes=whole.boundary_bytes // tp,
        delayed_bytes=0,
        divided_transient_bytes=0,
        loose_bytes=0,
        # What hides the end of a step where backwards are divided: more is less of it exposed, and
        # beyond `backward` seconds the backward would be longer itself.
        backward_weights=backward,
        forward_ep=there,
        backward_ep=back,
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


def part_of_experts(whole: BlockCost, kind: Kind, ranks: int) -> BlockCost:
    """`whole` with the parameters of one of `ranks` ranks that split its experts, as `kind` has
    them. The rest is a bound: rows that come from other ranks are kept besides."""
    held = [n for n in kind.graph.graph.find_nodes(op="placeholder") if n.meta.get(EP)]
    count = sum(n.meta["val"].numel() for n in held)
    trained = sum(n.meta["val"].numel() for n in held if n.meta.get("requires_grad"))
    return replace(
        whole,
        parameters=whole.parameters - (ranks - 1) * count,
        trainable=whole.trainable - (ranks - 1) * trained,
        experts=Experts(count, trained),
    )


def part_of_sequence(block: BlockCost, cp: int) -> BlockCost:
    """A bound for one of `cp` ranks: a part of the time and of the activations, all parameters."""
    return replace(
        block,
        forward_compute=block.forward_compute / cp,
        backward_compute=block.backward_compute / cp,
        forward_comm=block.forward_comm / cp,
        backward_comm=block.backward_comm / cp,
        forward_ep=block.forward_ep / cp,
        backward_ep=block.backward_ep / cp,
        saved_bytes=block.saved_bytes // cp,
        input_bytes=block.input_bytes // cp,
        boundary_bytes=block.boundary_bytes // cp,
        partial=tuple(replace(o, kept=o.kept // cp) for o in block.partial),
    )


def only_seconds(floor: BlockCost, seconds: float) -> BlockCost:
    """`floor` with all its time as one sum."""
    return replace(
        floor,
        forward_compute=seconds,
        backward_compute=0.0,
        forward_comm=0.0,
        backward_comm=0.0,
        forward_ep=0.0,
        backward_ep=0.0,
    )
