"""Seconds of the collectives that splitting the sequence put into a block graph."""

from __future__ import annotations

from autopar.axis import Axis
from autopar.cost.collective import collective_time
from autopar.cost.op_cost import is_reshard
from autopar.op_call import OpCall
from autopar.reshard import RESHARDS


def sequence_moves(call: OpCall, axis: Axis) -> tuple[str, float, float] | None:
    """Of a reshard over cp: its collective ('' for none) and the seconds of forward and backward.

    None for any other op. `call` has the types that one rank of `axis`, the axis that is placed
    inside of cp, sees; what moves is its slice alone.
    """
    if not is_reshard(call) or axis.cp == 1:
        return None
    edge = RESHARDS[call.op_name]
    nbytes = max(t.nbytes for t in (*call.types, *call.results))
    if call.op_name == "all_to_all":
        nbytes *= axis.cp

    def seconds(kind: str) -> float:
        if not kind:
            return 0.0
        return collective_time(kind, nbytes, axis.cp, axis.stride * axis.ranks, axis.cluster)

    back = edge.backward if call.result.requires_grad else ""
    return edge.forward or back, seconds(edge.forward), seconds(back)
