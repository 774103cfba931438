"""What a block works with when its backward is divided: in the first half, which makes gradients of
values alone, and from it to the second, which makes those of the weights.

    first half   all that was saved stays; gradients of values come and go
    in between   the gradient of the result of each op that reads a weight, and what was saved for
                 these ops and all before them

Ops whose operands are all made of weights (a cast, say) run in the second half only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from autopar.cost.op_cost import VIEWS
from autopar.passes.analysis.workspace import backward_workspace
from autopar.program import tensors_of

# Ops that hand their gradient on as it is, to every operand of the same size.
HANDED_ON = frozenset({"add", "add_", "all_reduce"})

# The gradient of a power is multiplied by exponent * x ** (exponent - 1): two values for a moment.
# (In a whole backward as much of what was saved is given back by then.)
POWER = 2


@dataclass(frozen=True, slots=True)
class DividedBackward:
    """Bytes of one micro-batch, on top of what the block saved: `delayed` from the first half to
    the second, and `most` at the fullest moment of the first half, those that are delayed by then
    included. `loose`: what was saved for ops behind the last one that reads a weight, and is given
    back between the halves if no other block is behind."""

    delayed: int
    most: int
    loose: int


@dataclass
class _Gradients:
    """Gradients of values, told apart by their memory."""

    sizes: list[int] = field(default_factory=list)
    of: dict[fx.Node, int] = field(default_factory=dict)
    delayed: set[int] = field(default_factory=set)

    def new(self, size: int) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def total(self, other: Collection[int]) -> int:
        return sum(self.sizes[k] for k in {*self.of.values(), *self.delayed, *other})


def divided_backward(
    graph: fx.GraphModule,
    values: Mapping[fx.Node, Any],
    weights: Collection[fx.Node],
    saved_at: Mapping[fx.Node, Sequence[int]],
    sizes: Mapping[int, int],
) -> DividedBackward:
    """`values`: of every node, on meta; `weights`: placeholders of parameters; `saved_at`: what
    each op saved, and `sizes` of that in bytes."""
    made = _of_values(graph, weights)
    found, most = _Gradients(), 0
    held: set[fx.Node] = set()
    for node in reversed(list(graph.graph.nodes)):
        if node not in made or node.op != "call_function":
            continue
        own = found.of.pop(node, None)
        if own is None:
            own = found.new(_bytes(values[node]))
        sources = [n for n in node.all_input_nodes if n.meta.get("requires_grad")]
        reads = any(source not in made for source in sources)
        if reads:
            found.delayed.add(own)
        if reads or not held.isdisjoint(node.users):
            held.add(node)
        name = getattr(node.target, "_opname", "")
        view = name in VIEWS
        beside = [] if view else [own]
        for source in sources:
            if source in made:
                size = _bytes(values[source])
                alike = view or (name in HANDED_ON and size == found.sizes[own])
                alone = source not in found.of
                if not alone:
                    beside.append(found.of[source])  # what is added to, for a moment
                found.of[source] = own if alike and alone else found.new(size)
        factors = POWER * found.sizes[own] if name == "pow" else 0
        most = max(most, found.total(beside) + factors + backward_workspace(node))
    kept = {key for node, keys in saved_at.items() if node in held for key in keys}
    loose = sum(size for key, size in sizes.items() if key not in kept)
    return DividedBackward(sum(found.sizes[k] for k in found.delayed), most, loose)


def _of_values(graph: fx.GraphModule, weights: Collection[fx.Node]) -> set[fx.Node]:
    """The nodes through which a gradient flows to some input that is not a weight."""
    found: set[fx.Node] = set()
    for node in graph.graph.nodes:
        if not node.meta.get("requires_grad"):
            continue
        if node.op == "placeholder":
            if node not in weights:
                found.add(node)
        elif any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _bytes(value: Any) -> int:
    return sum(t.nbytes for t in tensors_of(value))
