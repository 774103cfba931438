"""Pictures of the distinct blocks of a plan, from their rewritten graphs."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from autopar.axis import Axis
from autopar.cluster import Cluster
from autopar.op_call import STATIC, op_call
from autopar.parts import Parts, Slot
from autopar.passes.analysis.block_memory import block_memory
from autopar.passes.analysis.roofline import OpPrice, roofline
from autopar.program import module_path, tensors_of
from autopar.report.block_picture import BlockPicture, EdgePicture, OpPicture

TRIVIAL = frozenset({"to", "detach", "clone", "contiguous"})


def block_pictures(parts: Parts, cluster: Cluster) -> list[BlockPicture]:
    """One picture for every kind of block; seconds are those of one micro-batch on one rank."""
    axis = Axis(parts.decided.mesh.tp, 1, cluster, parts.decided.mesh.cp)
    return [
        _picture(kind, len(parts.blocks.kinds[kind]), graph, parts.slots[kind], axis)
        for kind, graph in parts.graphs.items()
    ]


def _picture(
    kind: str, count: int, graph: fx.GraphModule, slots: tuple[Slot, ...], axis: Axis
) -> BlockPicture:
    calls = [n for n in graph.graph.nodes if n.op == "call_function" and "reshard" not in n.meta]
    names = {n: str(n.meta["name_in_plan"]) for n in calls}
    placeholders = graph.graph.find_nodes(op="placeholder")
    prices: dict[str, OpPrice] = {}
    seconds: dict[str, float] = defaultdict(float)
    for found in roofline(graph, axis):
        # An op that exchanges rows has two prices: its own is the first.
        prices.setdefault(found.node, found)
        seconds[found.node] += found.cost.forward_seconds + found.cost.backward_seconds
    memory = block_memory(graph, slots).per_node
    ops = []
    for node in calls:
        price = prices[node.name]
        strategy = node.meta.get("strategy")
        ops.append(
            OpPicture(
                name=names[node],
                op=op_call(node, STATIC).op_name,
                module=module_path(node),
                shape=tuple(node.meta.get("global_shape") or ()),
                placement=str(node.meta["placement"]),
                strategy=strategy.name if strategy else "",
                flops=price.cost.forward_flops + price.cost.backward_flops,
                seconds=seconds[node.name],
                bound=price.cost.bound,
                saved_bytes=memory.get(node.name, 0),
                trivial=price.trivial or price.op in TRIVIAL,
            )
        )
    labels = {n: s.name for n, s in zip(placeholders, slots, strict=True)}
    edges = [e for node in calls for e in _edges(node, names, labels)]
    return BlockPicture(kind, count, tuple(ops), tuple(edges))


def _edges(
    node: fx.Node, names: dict[fx.Node, str], labels: dict[fx.Node, str]
) -> list[EdgePicture]:
    found = []
    for source in node.all_input_nodes:
        edge = source.meta.get("reshard")
        origin = source.args[0] if edge is not None else source
        assert isinstance(origin, fx.Node)
        values = tensors_of(source.meta.get("val"))
        grad = bool(source.meta.get("requires_grad"))
        found.append(
            EdgePicture(
                names.get(origin) or labels.get(origin, origin.name),
                names[node],
                edge.forward if edge else "",
                edge.backward if edge and grad else "",
                sum(v.nbytes for v in values),
            )
        )
    return found
