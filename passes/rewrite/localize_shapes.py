"""Turn a placed graph with global shapes into the graph that one rank runs.

    view(h, [1, 8192, 32, 128])                ->   view(h, [1, 8192, 4, 128])
    embedding(w, ids)                          ->   autopar.vocab_embedding(w, ids, -1, 8, 'tp')
    cross_entropy_loss(logits, target)         ->   autopar.vocab_cross_entropy(
                                                   logits, target, -100, 0.0, 8, 'tp')

Every op is run on meta tensors of the local shapes; a result whose shape is not the placement's
is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.errors import PassError
from autopar.experts import EXPERTS
from autopar.experts.operands import own_arguments
from autopar.parts import Parts
from autopar.passes.rewrite.specialize import RESIZING, run_on_meta
from autopar.placement import Placement
from autopar.program import tensors_of, user_line
from autopar.sequence_shards import ATTENTION_ROWS, LOSS_SHARE, rows_arguments


@dataclass(frozen=True)
class LocalizeShapes:
    name: str = "localize-shapes"

    def run(self, parts: Parts) -> Parts:
        ranks = parts.decided.mesh.tp
        for graph in parts.graphs.values():
            localize_shapes(graph, ranks)
        return parts


def localize_shapes(graph: fx.GraphModule, ranks: int, axis: str = "tp") -> None:
    """Edit a block graph with collectives in place; `meta["global_shape"]` keeps what was."""
    for node in graph.graph.nodes:
        placement: Placement | None = node.meta.get("placement")
        values = tensors_of(node.meta.get("val"))
        if placement is None or not values:
            continue
        shapes = [tuple(v.shape) for v in values]
        node.meta["global_shape"] = shapes[0]
        if ranks == 1 or node.op == "get_attr":
            continue
        expected = [placement.local_shape(s, ranks) for s in shapes]
        if node.op == "placeholder":
            # Strided as a slice of the original would be after it was made contiguous.
            node.meta["val"] = torch.empty(expected[0], dtype=values[0].dtype, device="meta")
            continue
        _substitute(node, ranks, axis)
        _divide(node, ranks)
        if getattr(node.target, "_opname", "") in RESIZING:
            node.update_arg(1, list(expected[0]))
        elif getattr(node.target, "_opname", "") == "unflatten":
            _, dim, sizes = node.args
            assert isinstance(dim, int) and isinstance(sizes, list | tuple)
            dim %= len(expected[0]) - len(sizes) + 1
            node.update_arg(2, list(expected[0][dim : dim + len(sizes)]))
        _run(node)
        got = [tuple(v.shape) for v in tensors_of(node.meta["val"])]
        if got != expected:
            raise PassError(
                f"{node.name} is {got} on a rank, its placement {placement} says {expected}",
                next_step="this is a fault of the op's sharding rule; please report it",
            )
    graph.recompile()


def _run(node: fx.Node) -> None:
    try:
        run_on_meta(node)
    except Exception as error:
        raise PassError(
            f"{node.name} can't run on the local shapes: {error} ({user_line(node)})",
            next_step="this is a fault of the op's sharding rule; please report it",
        ) from error


def _divide(node: fx.Node, ranks: int) -> None:
    """Counts of what is sharded (the groups of a convolution) become those of a rank."""
    strategy = node.meta.get("strategy")
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    for name in strategy.divided if strategy is not None else ():
        position = next(i for i, a in enumerate(arguments) if a.name == name)
        if position < len(node.args):
            count = node.args[position]
            assert isinstance(count, int)
            node.update_arg(position, count // ranks)
        else:
            count = node.kwargs[name]
            assert isinstance(count, int)
            node.update_kwarg(name, count // ranks)


def _substitute(node: fx.Node, ranks: int, axis: str) -> None:
    strategy = node.meta.get("strategy")
    local = strategy.local_op if strategy is not None else ""
    if not local:
        return
    args, kwargs = node.args, node.kwargs
    if local == LOSS_SHARE:
        _weigh(node, ranks, axis)
        return
    ops = torch.ops.autopar
    if local == "vocab_embedding":
        padding = args[2] if len(args) > 2 else kwargs.get("padding_idx", -1)
        node.args = (args[0], args[1], padding, ranks, axis)
    elif local == ATTENTION_ROWS:
        given = _given(node)
        tensors = (given["query"], given["key"], given["value"])
        grouped = bool(given.get("enable_gqa"))
        node.args = rows_arguments(*tensors, given.get("scale"), grouped, ranks, axis)
    elif local in EXPERTS:
        node.args = own_arguments(args, ranks, axis)
    else:
        ignore = args[4] if len(args) > 4 else kwargs.get("ignore_index", -100)
        smoothing = args[5:6] or (kwargs.get("label_smoothing", 0.0),)
        smoothing = () if local == "token_cross_entropy" else smoothing
        node.args = (args[0], args[1], ignore, *smoothing, ranks, axis)
    node.target = getattr(ops, local).default
    node.kwargs = {}


def _given(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call by name."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    return {a.name: v for a, v in zip(arguments, node.args, strict=False)} | dict(node.kwargs)


def _weigh(node: fx.Node, ranks: int, axis: str) -> None:
    """A mean over this rank's targets becomes its part of the mean over all ranks'."""
    given = _given(node)
    args = (node, given["target"], given.get("ignore_index", -100), ranks, axis)
    with node.graph.inserting_after(node):
        part = node.graph.call_function(torch.ops.autopar.loss_share.default, args)
    part.meta = {k: v for k, v in node.meta.items() if k not in ("strategy", "flops")}
    node.replace_all_uses_with(part, delete_user_cb=lambda user: user is not part)
