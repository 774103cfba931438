"""What limits each op of a block graph: arithmetic, memory bandwidth, its launch, or the links."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import fx

from autopar.axis import Axis
from autopar.cost.collective import collective_time
from autopar.cost.op_cost import OpCost, is_view, op_cost
from autopar.experts import EXCHANGED
from autopar.mesh import EP
from autopar.op_call import STATIC, op_call
from autopar.passes.analysis.expert_moves import (
    expert_moves,
    exposed_moves,
    known_hiding,
    over_replicas,
)
from autopar.passes.analysis.flops import forward_flops
from autopar.passes.analysis.sequence_moves import sequence_moves
from autopar.program import module_path, tensors_of

COMMUNICATION = "communication"


@dataclass(frozen=True, slots=True)
class OpPrice:
    """One op of a block as priced: for the roofline table and the picture. `axis`: cp for the
    messages of splitting the sequence, ep for those between ranks that split experts. `hidden`:
    seconds of messages, forward and backward, that are not in the cost: compute hides them."""

    node: str
    op: str
    path: str
    cost: OpCost
    trivial: bool
    axis: str = ""
    hidden: float = 0.0


def roofline(graph: fx.GraphModule, axis: Axis) -> list[OpPrice]:
    """Seconds and class (compute, memory, launch or communication bound) of every op."""
    prices = []
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if "reshard" in node.meta:
            prices.append(_collective(node, axis))
            continue
        call = op_call(node, STATIC)
        if move := sequence_moves(call, axis):
            name, forward, backward = move
            cost = OpCost(forward, backward, 0.0, 0.0, 0.0, COMMUNICATION)
            prices.append(OpPrice(node.name, name, call.path, cost, not name, "cp"))
            continue
        cost = op_cost(call, forward_flops(node, call), axis.cluster.device)
        prices.append(OpPrice(node.name, call.op_name, call.path, cost, is_view(call)))
        if call.op_name == EXCHANGED:
            seconds = exposed_moves(call, axis, known_hiding(node))
            cost = OpCost(*seconds, 0.0, 0.0, 0.0, COMMUNICATION)
            over = EP if over_replicas(call) else ""
            hidden = sum(expert_moves(call, axis)) - sum(seconds)
            prices.append(OpPrice(node.name, "all_to_all", call.path, cost, False, over, hidden))
    return prices


def _collective(node: fx.Node, axis: Axis) -> OpPrice:
    """An inserted reshard: its collective and, where a gradient comes back, the conjugate one."""
    edge = node.meta["reshard"]
    nbytes = prod(node.meta["global_shape"]) * tensors_of(node.meta["val"])[0].element_size()

    def seconds(kind: str) -> float:
        if not kind:
            return 0.0
        return collective_time(kind, nbytes, axis.ranks, axis.stride, axis.cluster)

    grad = bool(node.meta.get("requires_grad"))
    backward = seconds(edge.backward) if grad else 0.0
    cost = OpCost(seconds(edge.forward), backward, 0.0, 0.0, 0.0, COMMUNICATION)
    name = edge.forward or (edge.backward if grad else "")
    return OpPrice(node.name, name, module_path(node), cost, trivial=not name)
