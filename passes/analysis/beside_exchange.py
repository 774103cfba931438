"""Which ops of a block run while rows travel to experts and back: shared experts, as a rule.

    up = linear(x, w_up)                           # beside the way there
    experts = exchanged_experts(x, index, weights, …)
    down = linear(up, w_down)                      # beside the way back
    add = experts + down

They neither read the experts' result nor make what the experts read. In their order, the first run
beside the way there, the others beside the way back, so that products are divided as evenly as can
be; more of the work there, where ranks have to agree on numbers of rows as well. The first product
is queued before the host waits for these numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from itertools import accumulate
from typing import Any, NamedTuple

from torch import fx

from autopar.experts import BESIDE, EXCHANGED, QUEUED, WAY_BACK, WAY_THERE
from autopar.experts.operands import is_expert_call
from autopar.op_call import STATIC, op_call
from autopar.passes.analysis.aliases import memory_roots, written
from autopar.passes.analysis.flops import forward_flops
from autopar.passes.analysis.random_ops import draws

# Of a node beside an exchange: the fewest seconds (forward, backward) that it takes however it is
# placed. That does not depend on a choice of placements, so prices of ops stay a sum.
LEAST = "least_seconds"
# Of a product that surely runs beside an exchange over the axis that is placed: the name of the
# call, and its fewest seconds.
SURELY = "surely_beside"


class Hiding(NamedTuple):
    """Seconds of compute beside an exchange: on the way there and back, and in the backward where
    gradients of what was sent on these ways travel."""

    there: float = 0.0
    back: float = 0.0
    gradient_there: float = 0.0
    gradient_back: float = 0.0


def exchanges(graph: fx.Graph) -> list[fx.Node]:
    """Calls of experts whose rows travel."""
    return [n for n in graph.nodes if getattr(n.target, "_opname", "") == EXCHANGED]


def mark_beside(graph: fx.Graph, call: fx.Node) -> None:
    """Write on nodes of a block graph what they run beside, if there is a product among them.

    A collective over the ranks of the exchange would wait for it, so what needs one runs after it.
    Where one of the ops draws random numbers or changes memory they stay where they are. What
    another exchange needs, when neither needs the other, is beside none of the two: each would wait
    for what runs beside the other.
    """
    apart = independent(graph, call)
    others = _around(apart, set(exchanges(graph)))
    free = [n for n in apart if BESIDE not in n.meta and n not in others]
    if any(draws(n) or written(n) for n in free) or _reads_what_changes(graph, free):
        return
    free = _without_collectives(free, group_of(call))
    products = [forward_flops(n, op_call(n, STATIC)) for n in free]
    if not any(products):
        return
    total = sum(products)
    there = [abs(total - 2 * done) for done in accumulate(products)]
    last = max(i for i, apart in enumerate(there) if apart <= min(there) + 1e-9 * total)
    first = next(i for i, product in enumerate(products) if product)
    for index, node in enumerate(free):
        way = WAY_BACK if index > last else QUEUED if index <= first else WAY_THERE
        node.meta[BESIDE] = call.name, way


def independent(graph: fx.Graph, call: fx.Node) -> list[fx.Node]:
    """Ops that do not need each other and a call, in order."""
    nodes = list(graph.nodes)
    around = _around(nodes, {call})
    return [n for n in nodes if n.op == "call_function" and n not in around]


def _around(nodes: list[fx.Node], some: set[fx.Node]) -> set[fx.Node]:
    """Those of `some` among the nodes, what they need of these, and what needs them."""
    needed, needing = some.intersection(nodes), some.intersection(nodes)
    for node in nodes:
        if needing.intersection(node.all_input_nodes):
            needing.add(node)
    for node in reversed(nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return needed | needing


def group_of(node: fx.Node) -> Any:
    """The group that a call of experts, or a collective, communicates in; None for other ops."""
    last = node.args[-1] if node.args else None
    return last if isinstance(last, str) else None


def beside(graph: fx.Graph, call: fx.Node, *ways: str) -> list[fx.Node]:
    """What was marked to run beside a call."""
    marks = [(call.name, way) for way in ways]
    return [n for n in graph.nodes if n.meta.get(BESIDE) in marks]


def surely_beside(graph: fx.Graph) -> dict[fx.Node, str]:
    """Products that run beside a call of experts wherever placements put collectives, should its
    rows come to travel over the axis that is placed: the name of the call.

    They are the first on their paths: a collective before them runs before the exchange, and one
    behind them after it, as `mark_beside` has it. The others may come after such a collective.
    """
    calls = [n for n in graph.nodes if is_expert_call(n)]
    found: dict[fx.Node, str] = {}
    for call in calls:
        if getattr(call.target, "_opname", "") == EXCHANGED:
            continue
        apart = independent(graph, call)
        others = _around(apart, set(calls))
        free = [n for n in apart if n not in others and n not in found]
        if any(draws(n) or written(n) for n in free) or _reads_what_changes(graph, free):
            continue
        behind: set[fx.Node] = set()
        for node in free:
            if behind.intersection(node.all_input_nodes):
                behind.add(node)
            elif forward_flops(node, op_call(node, STATIC)):
                behind.add(node)
                found[node] = call.name
    return found


def hiding(call: fx.Node, least: Callable[[fx.Node], tuple[float, float]]) -> Hiding:
    """What an exchange hides behind; `least` tells seconds, forward and backward, of a node."""

    def seconds(*ways: str) -> tuple[float, float]:
        each = [least(node) for node in beside(call.graph, call, *ways)]
        return sum(e[0] for e in each), sum(e[1] for e in each)

    there, back = seconds(QUEUED, WAY_THERE), seconds(WAY_BACK)
    return Hiding(there[0], back[0], there[1], back[1])


def sure_hiding(call: fx.Node, some: Container[fx.Node] | None = None) -> Hiding:
    """What an exchange over the axis that is placed surely hides behind (of `some` nodes alone), as
    annotated; on which of both ways is not known."""
    least = [
        n.meta[SURELY][1]
        for n in call.graph.nodes
        if n.meta.get(SURELY, ("",))[0] == call.name and (some is None or n in some)
    ]
    return Hiding(sum(f for f, _ in least), 0.0, sum(b for _, b in least), 0.0)


def known_least(node: fx.Node) -> tuple[float, float]:
    """As annotated; nothing where it was not."""
    found: tuple[float, float] = node.meta.get(LEAST, (0.0, 0.0))
    return found


def _without_collectives(nodes: list[fx.Node], group: Any) -> list[fx.Node]:
    """Without collectives of a group, what leads to them alone, and what they lead to. Those that
    need no product may run before."""
    before: set[fx.Node] = set()
    after: set[fx.Node] = set()
    inside = set(nodes)
    for node in nodes:
        if group_of(node) != group:
            if any(source in after for source in node.all_input_nodes):
                after.add(node)
            continue
        leading = _leading_to(node, inside)
        late = any(n in after or forward_flops(n, op_call(n, STATIC)) for n in leading)
        (after if late else before).update([node] if late else leading)
    return [n for n in nodes if n not in before | after]


def _leading_to(node: fx.Node, inside: set[fx.Node]) -> set[fx.Node]:
    found, waiting = {node}, [node]
    while waiting:
        for source in waiting.pop().all_input_nodes:
            if source in inside and source not in found:
                found.add(source)
                waiting.append(source)
    return found


def _reads_what_changes(graph: fx.Graph, nodes: Iterable[fx.Node]) -> bool:
    roots = memory_roots(graph)
    changed = {roots[source] for n in graph.nodes for source in written(n)}
    return any(roots[s] in changed for n in nodes for s in (n, *n.all_input_nodes))
