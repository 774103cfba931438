"""Seconds of the exchanges of rows between ranks that split a layer's experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from autopar.axis import Axis
from autopar.cluster import Device
from autopar.cost.experts import ExchangeTime, exchange_seconds
from autopar.cost.step import exposed_on
from autopar.experts import BESIDE, EXCHANGED, EXPERTS
from autopar.mesh import EP
from autopar.op_call import OpCall
from autopar.passes.analysis.beside_exchange import LEAST, Hiding, exchanges, hiding
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
    """`expert_moves`, forward and backward, as far as they are not hidden.

    Only between replicas, and where the framework overlaps at all: collectives of the axis that is
    placed would wait for an exchange on it, so that nothing is counted on there.
    """
    moves, device = expert_moves(call, axis), axis.cluster.device
    if not over_replicas(call) or not device.overlap_experts:
        return moves.forward, moves.backward
    there, back, gradient_there, gradient_back = (
        exposed_on(needed, hidden, device) for needed, hidden in zip(moves, behind, strict=True)
    )
    return there + back, gradient_there + gradient_back


def hidings(graph: fx.GraphModule, found: Candidates, device: Device) -> Mapping[str, Hiding]:
    """What each exchange of a static block graph hides behind, by the name of its node."""
    least = _least(found, device)
    return {call.name: hiding(call, least) for call in exchanges(graph.graph)}


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
