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
    LIMIT,
    drawn,
    own_randomness,
    run_nodes,
    same,
)
from autopar.program import tensors_of

Dim = Callable[[fx.Node], int | None]
_LINEAR = frozenset(
    ["add", "sub", "neg", "view", "reshape", "unsqueeze", "squeeze", "expand", "sum", "mean"]
    + ["clone", "contiguous", "detach", "stack", "cat", "getitem", "t", "transpose", "permute"]
)
# Of values as drawn: what is linear near 1 alone (a clamp, a hinge) shows at others.
_SCALES = (1.0, 1e-3, 1e3)


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
    reached: set[fx.Node], kinds: Mapping[fx.Node, str], counting: Callable[[fx.Node], bool]
) -> tuple[set[fx.Node], set[fx.Node]]:
    """Of connected nodes those up to where the parts are put together, and the last of these; none
    where others see more than them.

    That is where samples first combine, or after ops on it that are linear whatever the values: a
    clamp that the probe did not reach belongs behind. `counting`: whether an op reads the number of
    samples, which is that of a part until then.
    """
    combine = {n for n in reached if n in kinds}
    first = combine - descendants(combine)
    carried = _carried(first, reached, kinds)
    ends = {n for n in carried if any(u not in carried for u in n.users)}
    beyond = descendants(ends)
    inside = reached - beyond
    leaks = any(u not in inside for n in inside - ends for u in n.users)
    if not ends or leaks or ends & beyond or any(counting(n) for n in beyond):
        return set(), set()
    return inside, ends


def _carried(
    first: set[fx.Node], reached: set[fx.Node], kinds: Mapping[fx.Node, str]
) -> set[fx.Node]:
    """The first nodes that combine, and linear ops on them whose readers are all such ops."""
    found, more = set(first), set(first)
    while more:
        more = {
            u
            for n in more
            for u in n.users
            if u in reached and u in kinds and u not in found and _is_linear(u)
            and all(s in found for s in u.all_input_nodes if s in reached)
        }  # fmt: skip
        found |= more
    while True:
        # Who reads it after it was put together must not be put together again.
        split = [n for n in found if any(u not in found for u in n.users)]
        late = {u for n in split for u in n.users if u in found} - first
        late |= {u for u in found - first if any(s in late for s in u.all_input_nodes)}
        if not late:
            return found
        found -= late


def _is_linear(node: fx.Node) -> bool:
    """Whether an op is linear in its tensors for all values, not only for those of the probe."""
    name = str(getattr(node.target, "_opname", ""))
    if name in ("mul", "div"):
        # A number, which may be that of samples; not another value.
        tensors = [n for n in node.all_input_nodes if tensors_of(n.meta.get("val"))]
        return len(tensors) == 1 and node.args[0] is tensors[0]
    if name in ("to", "_to_copy"):
        value = node.meta.get("val")
        return isinstance(value, Tensor) and value.dtype != torch.bool
    return name in _LINEAR


def reads_size(node: fx.Node, symbol: Any) -> bool:
    """Whether a number that depends on the symbol of a size is an operand."""
    sizes = [n.meta.get("val") for n in node.all_input_nodes]
    numbers = [s for s in sizes if isinstance(s, torch.SymInt | torch.SymFloat)]
    return any(s.node.expr.has(symbol) for s in numbers)


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
        for scale in _SCALES:
            values = {n: drawn(n, whole, generator, scale) for n in outside}
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
