"""Put what does not need a layer's experts beside their exchange.

up = linear(x, w_up)                            router = linear(x, w_router)
down = linear(up, w_down)                       …
router = linear(x, w_router)              ->    up = linear(x, w_up)
…                                               experts = exchanged_experts(x, index, weights, …)
experts = exchanged_experts(x, index, …)        down = linear(up, w_down)
add = experts + down                            add = experts + down

The runtime starts the exchange before the first of them and waits for it after the last
(`autopar.runtime.divided_exchange`). Which ops: `autopar.passes.analysis.beside_exchange`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from autopar.experts import BESIDE, QUEUED, WAY_BACK, WAY_THERE
from autopar.mesh import EP
from autopar.parts import Parts
from autopar.passes.analysis.beside_exchange import (
    beside,
    exchanges,
    group_of,
    independent,
    mark_beside,
)


@dataclass(frozen=True)
class OrderExchanges:
    name: str = "order-exchanges"

    def run(self, parts: Parts) -> Parts:
        for graph in parts.graphs.values():
            order_exchanges(graph)
        return parts


def order_exchanges(graph: fx.GraphModule) -> None:
    """Edit a block graph, as one rank runs it, in place."""
    found = exchanges(graph.graph)
    for call in found:
        # Between replicas they were marked where experts were split, as prices depend on it.
        if group_of(call) != EP:
            mark_beside(graph.graph, call)
        if beside(graph.graph, call, QUEUED, WAY_THERE, WAY_BACK):
            _order(graph.graph, call)
    if found:
        graph.graph.lint()
        graph.recompile()


def _order(graph: fx.Graph, call: fx.Node) -> None:
    """Collectives were inserted since ops were marked: they run beside the exchange too, or before
    or after it where they would wait for it."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    before: list[fx.Node] = []
    after: list[fx.Node] = []
    for node in independent(graph, call):
        ways = [way for s in node.all_input_nodes for name, way in _mark(s) if name == call.name]
        if BESIDE in node.meta:
            continue
        if not ways and not any(source in after for source in node.all_input_nodes):
            before.append(node)
        elif group_of(call) == EP:
            node.meta[BESIDE] = call.name, max(ways, key=(QUEUED, WAY_THERE, WAY_BACK).index)
        else:
            after.append(node)
    for node in before:
        if place[node] > place[call]:
            call.prepend(node)
    for node in beside(graph, call, QUEUED, WAY_THERE):
        call.prepend(node)
    last = call
    for node in beside(graph, call, WAY_BACK):
        last.append(node)
        last = node
    for node in after:
        if place[node] < place[call]:
            last.append(node)
            last = node


def _mark(node: fx.Node) -> list[tuple[str, str]]:
    return [node.meta[BESIDE]] if BESIDE in node.meta else []
