"""A boolean mask of queries by keys as one interval of keys for each query, without making it.

    le(key[None, :], query[:, None])         ->   query i: keys [0, i + 1)
    and(that, gt(key[None, :], query - w))   ->   query i: keys [i - w + 1, i + 1)

Exact where it answers. A mask of 131,072 positions has 17 billion entries, and its intervals
131,072: what is compared are vectors, one over queries and one, in ascending order, over keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.program import tensors_of

Tensor = torch.Tensor
# Values of up to so many elements are computed as they are.
SMALL = 2**24
_SAME = frozenset(["to", "_to_copy", "expand", "clone", "contiguous", "alias", "detach"])
_AND = frozenset(["__and__", "bitwise_and", "logical_and"])
# Keys up to a query's bound, or from it on; whether a key that equals the bound is one of them.
_PREFIX = {"le": True, "lt": False}
_SUFFIX = {"ge": True, "gt": False}
_TURNED = {"le": "ge", "lt": "gt", "ge": "le", "gt": "lt", "eq": "eq"}


class Intervals(NamedTuple):
    """Query i may read keys `start[i]` to `stop[i]` - 1."""

    start: Tensor
    stop: Tensor


def mask_intervals(graph: fx.GraphModule) -> Intervals | None:
    """Of the one result of a static graph without inputs; None where its form is another.

    The graph has to be on the CPU; values that are small are computed.
    """
    known: dict[fx.Node, Any] = {}
    with torch.no_grad():
        for node in graph.graph.nodes:
            if node.op == "output":
                result = known.get(node.args[0][0])
                return result if isinstance(result, Intervals) else None
            known[node] = _value(graph, node, known)
            if known[node] is None:
                return None
    return None


def _value(graph: fx.GraphModule, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    if node.op == "get_attr":
        return graph.get_buffer(str(node.target))
    if node.op != "call_function":
        return None
    if all(t.numel() <= SMALL for t in tensors_of(node.meta["val"])):
        if any(isinstance(known[n], Intervals) for n in node.all_input_nodes):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known[n])
        target: Any = node.target
        return target(*args, **kwargs)
    name = str(getattr(node.target, "_opname", ""))
    operands: list[Any] = [known[a] if isinstance(a, fx.Node) else a for a in node.args[:2]]
    keys = int(node.meta["val"].shape[-1])
    if name in _SAME:
        kept = isinstance(operands[0], Intervals) and node.meta["val"].dtype is torch.bool
        return operands[0] if kept else None
    if name in _AND:
        one, other = (_as_intervals(o, node.meta["val"].shape) for o in operands)
        return _common(one, other) if one is not None and other is not None else None
    if name in _TURNED and all(isinstance(o, Tensor) for o in operands):
        return _compared(name, operands[0], operands[1], keys)
    return None


def _as_intervals(value: Any, shape: torch.Size) -> Intervals | None:
    """Intervals as they are; a condition that holds for all entries, as all keys."""
    if isinstance(value, Intervals):
        return value
    if isinstance(value, Tensor) and value.dtype is torch.bool and bool(value.all()):
        start = torch.zeros(shape[-2], dtype=torch.int64)
        return Intervals(start, start + shape[-1])
    return None


def _common(a: Intervals, b: Intervals) -> Intervals:
    return Intervals(torch.maximum(a.start, b.start), torch.minimum(a.stop, b.stop))


def _compared(name: str, left: Tensor, right: Tensor, keys: int) -> Intervals | None:
    """`left` op `right`, one of which varies over keys, the other over queries."""
    if not _varies(left, -1):
        left, right, name = right, left, _TURNED[name]
    if not (_varies(left, -1) and _varies(right, -2)):
        return None
    along, bound = left.flatten(), right.flatten()
    if len(along) != keys or bool((along[1:] < along[:-1]).any()):
        return None
    zero = torch.zeros(len(bound), dtype=torch.int64)
    below, upto = (torch.searchsorted(along, bound, right=r) for r in (False, True))
    if name in _PREFIX:
        return Intervals(zero, upto if _PREFIX[name] else below)
    if name in _SUFFIX:
        return Intervals(below if _SUFFIX[name] else upto, zero + keys)
    return Intervals(below, upto)


def _varies(value: Tensor, dim: int) -> bool:
    """Whether it has entries along `dim` alone."""
    return value.dim() >= -dim and value.shape[dim] == value.numel() > 1
