"""Values of a batch that are the mean or the sum of those of its parts: found by running them.

What balances the load of experts is a product of two such values:

    chosen[t, e] -> mean -> [e] \\
                                  mul -> sum -> a term of the loss
    softmax[t, e] -> mean -> [e] /

Ranks that have parts of the batch can take the mean of the two means, and go on as one would.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.op_call import Bindings, types_of
from autopar.passes.analysis.sample_probe import (
    DRAWS,
    LIMIT,
    drawn,
    own_randomness,
    run_nodes,
    same,
)
from autopar.program import tensors_of

Dim = Callable[[fx.Node], int | None]


def connected(
    node: fx.Node,
    tail: Collection[fx.Node],
    at: Mapping[fx.Node, int],
    moving: Collection[fx.Node],
    dim_of: Dim,
) -> set[fx.Node]:
    """All before the `tail` that is computed from a node, with what else leads there.

    Two such values may meet before the loss: what leads to both is looked at as one. `at`: values
    of which it is known where they hold samples, and where it ends; `moving`: those that depend on
    samples. Where samples go on that were kept apart before (x - x.mean(0)) is beyond it.
    """
    reached: set[fx.Node] = set()
    stack = [node]
    while stack:
        found = stack.pop()
        if found in reached or found in tail or found.op != "call_function":
            continue
        reached.add(found)
        stack += [
            s
            for s in found.all_input_nodes
            if s in moving and s not in at and tensors_of(s.meta.get("val"))
        ]
        stack += [
            u
            for u in found.users
            if dim_of(u) is None or not any(n in at for n in u.all_input_nodes)
        ]
    return reached


def until_combined(
    reached: set[fx.Node], kinds: Mapping[fx.Node, str]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Of connected nodes those up to the last ones that combine, and these; none where others see
    more than these."""
    ends = {n for n in reached if n in kinds and any(u not in kinds for u in n.users)}
    inside = reached - descendants(ends)
    leaks = any(u not in inside for n in inside - ends for u in n.users)
    if not ends or leaks or any(u in inside for n in ends for u in n.users):
        return set(), set()
    return inside, ends


def descendants(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """All that is computed from some nodes, without these."""
    found: set[fx.Node] = set()
    stack = [user for node in nodes for user in node.users]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.users
    return found


def combining(
    nodes: Sequence[fx.Node], batched: Mapping[fx.Node, int], whole: Bindings, half: Bindings
) -> dict[fx.Node, str]:
    """Of what `nodes` are for a batch: which are the `mean`, which the `sum` of what they are for
    its halves. `batched`: values that hold the batch and the dim of each; `half`: the sizes of
    `whole` with half as many samples. None are where the nodes can't be run.
    """
    inside = set(nodes)
    outside = list(dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in inside))
    if sum(t.numel for n in outside for t in types_of(n, whole)) > LIMIT:
        return {}
    found = {n: {"mean", "sum"} for n in nodes}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad(), own_randomness(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(DRAWS):
            values = {n: drawn(n, whole, generator) for n in outside}
            try:
                one = run_nodes(nodes, values, whole)
                parts = [run_nodes(nodes, _half(values, batched, half, i), half) for i in (0, 1)]
            except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
                return {}
            for node, kinds in found.items():
                kinds &= _combines(one[node], *(part[node] for part in parts))
    # What is both is zero, and right either way.
    return {n: "mean" if "mean" in kinds else "sum" for n, kinds in found.items() if kinds}


def _combines(whole: Any, first: Any, second: Any) -> set[str]:
    if not all(isinstance(t, Tensor) and t.shape == whole.shape for t in (first, second)):
        return set()
    if whole.dtype == torch.bool or whole.is_complex():
        return set()
    kinds = set()
    if same(first + second, whole):
        kinds.add("sum")
    if whole.is_floating_point() and same((first + second) / 2, whole):
        kinds.add("mean")
    return kinds


def _half(
    values: Mapping[fx.Node, Any], batched: Mapping[fx.Node, int], half: Bindings, index: int
) -> dict[fx.Node, Any]:
    given: dict[fx.Node, Any] = {}
    for node, value in values.items():
        if node in batched and isinstance(value, Tensor):
            given[node] = value.chunk(2, batched[node])[index]
        elif isinstance(value, Tensor | list):
            given[node] = value
        else:
            given[node] = half.size(node.meta.get("val"))
    return given
