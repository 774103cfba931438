"""Seconds of the exchanges of rows between ranks that split a layer's experts."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from torch import fx

from autopar.axis import Axis
from autopar.cluster import Device
from autopar.cost.experts import ExchangeTime, exchange_seconds
from autopar.cost.step import exposed_on
from autopar.experts import BESIDE, EXCHANGED, EXPERTS
from autopar.mesh import EP
from autopar.op_call import STATIC, OpCall, op_call
from autopar.passes.analysis.beside_exchange import (
    LEAST,
    SURELY,
    Hiding,
    exchanges,
    hiding,
    known_least,
    sure_hiding,
    surely_beside,
)
from autopar.passes.analysis.candidates import Candidates

NOTHING = Hiding()


def over_replicas(call: OpCall) -> bool:
    """Whether a call exchanges rows between replicas, not on the axis that is placed."""
    return call.op_name == EXCHANGED and call.named("group") == EP


def expert_moves(call: OpCall, axis: Axis) -> ExchangeTime:
    """Of a call as one rank of `axis` runs it; zero for no exchange.

    Replicas are next outside of the ranks of the axis, so neighbours among them are as far apart as
    that axis has ranks.
    """
    if call.op_name not in EXPERTS:
        return ExchangeTime()
    stride = axis.stride * axis.ranks if over_replicas(call) else axis.stride
    return exchange_seconds(call, stride, axis.cluster)


def exposed_moves(call: OpCall, axis: Axis, behind: Hiding = NOTHING) -> tuple[float, float]:
    """`expert_moves`, forward and backward, as far as they are not hidden, where the framework
    overlaps at all.

    Over the axis that is placed, collectives decide what runs beside which way: as much is hidden
    as would be if all of it ran beside the shorter one.
    """
    moves, device = expert_moves(call, axis), axis.cluster.device
    if not device.overlap_experts:
        return moves.forward, moves.backward
    if not over_replicas(call):
        needed = (moves.there, moves.back), (moves.gradient_there, moves.gradient_back)
        total = behind.there + behind.back, behind.gradient_there + behind.gradient_back
        hidden = [min(h, *ways) for h, ways in zip(total, needed, strict=True)]
        seen = [sum(w) - h + exposed_on(h, h, device) for w, h in zip(needed, hidden, strict=True)]
        return seen[0], seen[1]
    there, back, gradient_there, gradient_back = (
        exposed_on(needed, hidden, device) for needed, hidden in zip(moves, behind, strict=True)
    )
    return there + back, gradient_there + gradient_back


def hidings(graph: fx.GraphModule, found: Candidates, device: Device) -> Mapping[str, Hiding]:
    """What each exchange of a static block graph hides behind, by the name of its node; of experts
    that are not split over replicas, what it would be over the axis that is placed."""
    least = _least(found, device)
    hidden = {call.name: hiding(call, least) for call in exchanges(graph.graph)}
    for node, call in surely_beside(graph.graph).items():
        forward, backward = least(node)
        known = hidden.get(call, NOTHING)
        sums = known.there + forward, known.gradient_there + backward
        hidden[call] = Hiding(sums[0], 0.0, sums[1], 0.0)
    return hidden


def annotate_surely(graph: fx.GraphModule, found: Candidates, device: Device) -> None:
    """Write on a block graph what `hidings` counts for exchanges over the axis that is placed."""
    least = _least(found, device)
    for node, call in surely_beside(graph.graph).items():
        node.meta[SURELY] = call, least(node)


def known_hiding(call: fx.Node, some: Container[fx.Node] | None = None) -> Hiding:
    """What an exchange hides behind (of `some` nodes alone), as annotated."""
    if not over_replicas(op_call(call, STATIC)):
        return sure_hiding(call, some)
    return hiding(call, lambda n: known_least(n) if some is None or n in some else (0.0, 0.0))


def annotate_least(graph: fx.GraphModule, found: Candidates, device: Device) -> None:
    """Write on a rank's graph what `hidings` counts of the ops beside exchanges."""
    least = _least(found, device)
    for node in graph.graph.nodes:
        if BESIDE in node.meta and node.name in found.calls:
            node.meta[LEAST] = least(node)


def _least(found: Candidates, device: Device) -> Callable[[fx.Node], tuple[float, float]]:
    def least(node: fx.Node) -> tuple[float, float]:
        costs = [p.cost for p in found.prices(node.name, device)]
        return (
            min(c.forward_seconds for c in costs),
            min(c.backward_seconds for c in costs),
        )

    return least
