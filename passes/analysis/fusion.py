"""Which ops of a block graph torch.compile would run as one kernel, and what each still moves.

Inductor fuses element-wise ops, reductions and copies with what they read and what reads them. A
product, attention or lookup is a kernel of its own; a view is no kernel and is looked through. A
kernel can't wait for another one in the middle, so ops are put in *levels*:

    level(op) = max over its inputs of level(input) + 1 if a kernel of its own lies between

Ops of one level that are joined by an edge are one kernel: no path between them leaves the level.

    pow -> mean -> add -> rsqrt -> mul -> mul -> linear        x, weight read; one result written

A collective that a placement puts between two ops of a kernel is not seen here: its own price
covers that it reads and writes memory.
"""

from __future__ import annotations

from torch import fx

from autopar.cost.op_cost import is_view
from autopar.op_call import STATIC, Fusion, OpCall, op_call
from autopar.rules import pointwise

# Reductions and normalisations that Inductor joins with the element-wise ops around them.
_REDUCTIONS_TEXT = """
mean sum amax amin max min var std prod cumsum softmax _softmax log_softmax _log_softmax logsumexp
layer_norm native_layer_norm rms_norm _fused_rms_norm group_norm norm linalg_vector_norm all any
"""
_COPIES_TEXT = (
    "clone contiguous reshape flatten cat stack pad copy repeat roll flip tril triu dropout"
)
FUSIBLE = frozenset([*pointwise.NAMES, *_REDUCTIONS_TEXT.split(), *_COPIES_TEXT.split()])


def fusions(graph: fx.GraphModule) -> dict[fx.Node, Fusion]:
    """The part of its kernel that every fusible op of a static block graph has."""
    calls = {n: op_call(n, STATIC) for n in graph.graph.nodes if n.op == "call_function"}
    by_name = {node.name: node for node in graph.graph.nodes}
    inputs = {n: [by_name[name] for name in call.operands] for n, call in calls.items()}
    fusible = {n for n, call in calls.items() if _is_fusible(call)}
    levels = _levels(graph, calls, fusible)
    sources = {n: [_source(s, calls, inputs) for s in inputs[n]] for n in calls if n in fusible}
    kernel = _kernels(sources, levels)
    leaders: set[fx.Node] = set()
    read: set[tuple[fx.Node, fx.Node]] = set()
    found = {}
    for node in sources:
        own = kernel[node]
        reads = []
        for index, source in enumerate(sources[node]):
            # One kernel reads a value once, whichever of its ops use it.
            if kernel.get(source) is not own and (own, source) not in read:
                read.add((own, source))
                reads.append(index)
        starts = own not in leaders
        leaders.add(own)
        found[node] = Fusion(tuple(reads), _is_used_outside(node, calls, kernel), starts)
    return found


def annotate_fusion(*graphs: fx.GraphModule) -> None:
    """Record `fusions` in the nodes' metadata, where op calls take it from."""
    for graph in graphs:
        for node, fusion in fusions(graph).items():
            node.meta["fusion"] = fusion


def _is_fusible(call: OpCall) -> bool:
    name = call.op_name
    return bool(call.results) and not is_view(call) and name.rstrip("_") in FUSIBLE


def _source(
    node: fx.Node, calls: dict[fx.Node, OpCall], inputs: dict[fx.Node, list[fx.Node]]
) -> fx.Node:
    """What a view, or a view of a view, looks at."""
    while node in calls and is_view(calls[node]) and inputs[node]:
        node = inputs[node][0]
    return node


def _levels(
    graph: fx.GraphModule, calls: dict[fx.Node, OpCall], fusible: set[fx.Node]
) -> dict[fx.Node, int]:
    levels: dict[fx.Node, int] = {}
    for node in graph.graph.nodes:
        level = 0
        for source in node.all_input_nodes:
            alone = source in calls and source not in fusible and not is_view(calls[source])
            level = max(level, levels[source] + alone)
        levels[node] = level
    return levels


def _kernels(
    sources: dict[fx.Node, list[fx.Node]], levels: dict[fx.Node, int]
) -> dict[fx.Node, fx.Node]:
    """Fusible op -> an op of its kernel that stands for it."""
    parent = {node: node for node in sources}

    def root(node: fx.Node) -> fx.Node:
        while parent[node] is not node:
            node = parent[node]
        return node

    for node, read in sources.items():
        for source in read:
            if source in parent and levels[source] == levels[node]:
                parent[root(node)] = root(source)
    return {node: root(node) for node in parent}


def _is_used_outside(
    node: fx.Node, calls: dict[fx.Node, OpCall], kernel: dict[fx.Node, fx.Node]
) -> bool:
    """Whether another kernel, or the graph's end, reads a result, views looked through."""
    own, waiting = kernel[node], list(node.users)
    while waiting:
        user = waiting.pop()
        if user in calls and is_view(calls[user]):
            waiting += user.users
        elif kernel.get(user) is not own:
            return True
    return False
