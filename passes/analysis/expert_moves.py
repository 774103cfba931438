"""Seconds of the exchanges of rows between ranks that split a layer's experts."""

from __future__ import annotations

from autopar.axis import Axis
from autopar.cost.experts import exchange_seconds
from autopar.experts import EXCHANGED, EXPERTS
from autopar.mesh import EP
from autopar.op_call import OpCall


def over_replicas(call: OpCall) -> bool:
    """Whether a call exchanges rows between replicas, not on the axis that is placed."""
    return call.op_name == EXCHANGED and call.named("group") == EP


def expert_moves(call: OpCall, axis: Axis) -> tuple[float, float]:
    """Of a call as one rank of `axis` runs it: forward and backward, zero for no exchange.

    Replicas are next outside of the ranks of the axis, so neighbours among them are as far apart as
    that axis has ranks.
    """
    if call.op_name not in EXPERTS:
        return 0.0, 0.0
    stride = axis.stride * axis.ranks if over_replicas(call) else axis.stride
    return exchange_seconds(call, stride, axis.cluster)
