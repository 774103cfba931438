"""Which ops of a block to run again in its backward: all trade-offs of seconds for bytes, exactly.

p_v = 1 when unit v runs again, which costs its forward seconds t_v, collectives included. A value u
of s_u bytes is kept when its maker does not run again although the backward or an op that runs
again needs it; what autograd keeps inside an op (i_v bytes) is kept when that op does not. For a
price of l seconds per byte

    minimise  sum p_v t_v + l * ( sum (1 - p_v) i_v
                                 + sum s_u [maker's p = 0] [u is saved, or a reader's p = 1] )

is a minimum cut: ops on the source's side run again; an auxiliary node for each value that is not
saved says that some reader runs again. The corners of the lower convex hull of (bytes, seconds)
come from prices found by bisection: the slope between two neighbours is the next price.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from math import gcd

from torch import fx

from autopar.axis import Axis
from autopar.block_cost import PartialRecompute
from autopar.experts import EXCHANGED
from autopar.op_call import STATIC, op_call
from autopar.parts import Slot
from autopar.passes.analysis.expert_moves import exposed_moves, known_hiding
from autopar.passes.analysis.kept_values import KeptValues, kept_values
from autopar.passes.analysis.roofline import COMMUNICATION, roofline
from autopar.program import outputs_of

# Costs become whole numbers for the flow: the sum of all stays below 2^58.
_RESOLUTION = 2**58
_NEVER = 2**60
# The search chooses one for every block: each more makes it slower.
MOST_SETS = 5


def recompute_frontier(
    graph: fx.GraphModule, slots: tuple[Slot, ...], axis: Axis, transient: int = 0
) -> tuple[PartialRecompute, ...]:
    """The corners for a block's local graph (one rank's), from fewer bytes freed to more; that of
    no op is left out, and `MOST_SETS` are enough.

    `transient`: the most that the block's backward needs on top of all that it saved. While ops run
    again there are the gradients of the block's results, and what only these ops read: what is
    above `transient` counts as rebuilt.
    """
    found = kept_values(graph, slots)
    waiting = sum(
        n.meta["val"].nbytes for n in outputs_of(graph.graph) if n.meta.get("requires_grad")
    )
    prices = again_prices(graph, axis)
    names = op_names(graph)
    seconds = [sum(sum(prices(n, u.nodes)) for n in u.nodes) for u in found.units]

    def corner(again: frozenset[int], label: str) -> PartialRecompute:
        nodes = [n for i in sorted(again) for n in found.units[i].nodes]
        costs = [prices(n, nodes) for n in nodes]
        return PartialRecompute(
            label,
            tuple(names[n] for n in nodes),
            sum(compute for compute, _ in costs),
            sum(comm for _, comm in costs),
            found.kept(again),
            found.rebuilt(again) + max(0, waiting + found.passing(again) - transient),
        )

    points = [(found.kept(s), sum(seconds[i] for i in s), s) for s in corners(found, seconds)]
    chosen = [again for _, _, again in thinned(points, MOST_SETS + 1) if again]
    return tuple(corner(again, f"set {i}") for i, again in enumerate(chosen, 1))


def again_prices(
    graph: fx.GraphModule, axis: Axis
) -> Callable[[fx.Node, Collection[fx.Node]], tuple[float, float]]:
    """Seconds of compute and of communication of an op when it runs again together with others:
    an exchange of rows is hidden by those of them alone that run beside it."""
    found: dict[str, list[float]] = {}
    for price in roofline(graph, axis):
        times = found.setdefault(price.node, [0.0, 0.0])
        times[price.cost.bound == COMMUNICATION] += price.cost.forward_seconds

    def prices(node: fx.Node, together: Collection[fx.Node]) -> tuple[float, float]:
        compute, comm = found[node.name]
        if getattr(node.target, "_opname", "") != EXCHANGED:
            return compute, comm
        hidden = known_hiding(node, together)
        return compute, exposed_moves(op_call(node, STATIC), axis, hidden)[0]

    return prices


def thinned(
    points: list[tuple[int, float, frozenset[int]]], most: int
) -> list[tuple[int, float, frozenset[int]]]:
    """At most `most` corners (bytes, seconds, set) of a hull, its two ends among them: those are
    left out, one by one, without which the hull rises least."""
    kept = list(points)

    def rise(i: int) -> float:
        (a, s, _), (b, t, _), (c, u, _) = kept[i - 1 : i + 2]
        share = (a - b) / max(1, a - c)
        return (s + share * (u - s) - t) * (a - c)

    while len(kept) > max(2, most):
        del kept[min(range(1, len(kept) - 1), key=rise)]
    return kept


def op_names(graph: fx.GraphModule) -> dict[fx.Node, str]:
    """Every op by the name that a plan uses; a collective, which no plan places, by that of its op
    and what it moves: `all_gather of add.1`."""
    found: dict[fx.Node, str] = {}
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if "name_in_plan" in node.meta:
            found[node] = node.meta["name_in_plan"]
        elif "reshard" in node.meta:
            source = node.all_input_nodes[0]
            base = f"{node.target._opname} of {found.get(source, f'input {source.name}')}"
            taken = sum(n == base or n.startswith(f"{base} #") for n in found.values())
            found[node] = f"{base} #{taken + 1}" if taken else base
    return found


def corners(found: KeptValues, seconds: list[float]) -> list[frozenset[int]]:
    """The sets of units at the corners of the hull, from the most bytes kept to the fewest."""
    none: frozenset[int] = frozenset()
    # A byte less is worth more than all seconds: the fewest bytes, and the fewest seconds for them.
    least = cut(found, seconds, 2 * sum(seconds) / _unit_bytes(found) + 1e-30)
    if found.kept(least) >= found.kept(none):
        return [none]
    return [none, *_between(found, seconds, none, least), least]


def _between(
    found: KeptValues, seconds: list[float], more: frozenset[int], less: frozenset[int]
) -> Iterator[frozenset[int]]:
    """Corners between two of them, in order."""

    def time(again: frozenset[int]) -> float:
        return sum(seconds[i] for i in again)

    price = (time(less) - time(more)) / (found.kept(more) - found.kept(less))
    middle = cut(found, seconds, price)
    line = time(more) + price * found.kept(more)
    below = line - (time(middle) + price * found.kept(middle))
    apart = found.kept(less) < found.kept(middle) < found.kept(more)
    if apart and below > 1e-9 * line:
        yield from _between(found, seconds, more, middle)
        yield middle
        yield from _between(found, seconds, middle, less)


def _unit_bytes(found: KeptValues) -> int:
    """No two sets of kept values differ by fewer bytes, unless by none."""
    sizes = [v.nbytes for v in found.values] + [u.internal for u in found.units]
    return max(1, gcd(*sizes)) if sizes else 1


def cut(found: KeptValues, seconds: list[float], price: float) -> frozenset[int]:
    """The units to run again at `price` seconds per byte: an optimal set, the smallest of them."""
    from ortools.graph.python import max_flow

    units, values = len(found.units), found.values
    source, sink = units + len(values), units + len(values) + 1
    keeping = [price * u.internal for u in found.units]
    total = sum(seconds) + price * (
        sum(v.nbytes for v in values) + sum(u.internal for u in found.units)
    )
    if not total:
        return frozenset()
    flow = max_flow.SimpleMaxFlow()

    def arc(tail: int, head: int, cost: float) -> None:
        flow.add_arc_with_capacity(tail, head, round(cost / total * _RESOLUTION))

    for index, value in enumerate(values):
        if value.saved:
            if value.maker is not None:
                keeping[value.maker] += price * value.nbytes
            continue
        if not value.readers:
            continue
        for reader in value.readers:
            flow.add_arc_with_capacity(reader, units + index, _NEVER)
        arc(units + index, sink if value.maker is None else value.maker, price * value.nbytes)
    for index, unit in enumerate(found.units):
        if keeping[index]:
            arc(source, index, keeping[index])
        if unit.why_not:
            flow.add_arc_with_capacity(index, sink, _NEVER)
        else:
            arc(index, sink, seconds[index])
    status = flow.solve(source, sink)
    assert status == flow.OPTIMAL, status
    return frozenset(n for n in flow.get_source_side_min_cut() if n < units)
