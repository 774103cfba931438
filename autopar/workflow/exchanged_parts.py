"""Experts as a framework exchanges rows in which every rank of tp routes a part of the tokens.

This package's runtime gathers the tokens over tp first, and every rank of tp exchanges all rows.
The other order sends less between nodes and more inside of one:

    tokens over tp, rows over ep          rows/tp over ep, rows over tp
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.axis import Axis
from autopar.block_cost import BlockCost
from autopar.cost.collective import collective_time
from autopar.cost.experts import exchange_seconds
from autopar.op_call import STATIC, op_call
from autopar.passes.analysis.beside_exchange import hiding, known_least
from autopar.passes.analysis.expert_moves import exposed_moves, over_replicas
from autopar.passes.rewrite.split_experts import expert_calls


def with_parts_exchanged(block: BlockCost, graph: fx.GraphModule, axis: Axis) -> BlockCost:
    """The price of `block` when a rank of tp exchanges a part of the rows; `graph`: as one rank
    runs it, with the tokens of all of tp."""
    there = back = around = 0.0
    for node in expert_calls(graph):
        call = op_call(node, STATIC)
        if not over_replicas(call):
            continue
        before = exposed_moves(call, axis, hiding(node, known_least))
        stride = axis.stride * axis.ranks
        after = exchange_seconds(call, stride, axis.cluster, parts=axis.ranks)
        there += after.forward - before[0]
        back += after.backward - before[1]
        # Tokens need not be gathered for it, nor what experts make of them scattered.
        tokens = call.types[0].nbytes
        around += sum(
            collective_time(kind, tokens, axis.ranks, axis.stride, axis.cluster)
            for kind in ("all_gather", "reduce_scatter")
        )
    return replace(
        block,
        forward_comm=block.forward_comm + there - around,
        backward_comm=block.backward_comm + back - around,
        forward_ep=block.forward_ep + there,
        backward_ep=block.backward_ep + back,
    )
