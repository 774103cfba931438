"""How the losses of micro-batches combine into the loss of the batch, read off the graph.

| form      | the loss is                                           | weight of a micro-batch     |
| --------- | ----------------------------------------------------- | --------------------------- |
| `targets` | a mean over the targets that are not ignored          | its share of those targets  |
| `ratio`   | a sum over the batch, divided by a count of the batch | its share of that count     |
| `mean`    | a mean over elements, as many for every sample        | 1 / number of micro-batches |
| `sum`     | a sum over the batch                                  | 1                           |
| `unknown` | anything else                                         | none: the batch stays whole |

Scaling by a constant, casts and sums of one form keep the form. A term that reads no sample (the
norm of the parameters) may be added where the weights sum to 1: it then counts once. A mean over
targets or by a count plus a mean over elements is `even`: one weight for both is right where every
micro-batch has as many targets, which the runtime checks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import fx

from autopar.passes.analysis.aliases import ancestors
from autopar.passes.analysis.blocks import needs_parameters
from autopar.passes.analysis.random_ops import draws
from autopar.program import Program

_SAME = frozenset(
    ["to", "_to_copy", "view", "reshape", "squeeze", "unsqueeze", "clone", "contiguous", "neg"]
)
# Position of `reduction` among the arguments; 1 is mean, 2 is sum.
_ELEMENTWISE = {
    "mse_loss": 2, "l1_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2,
    "binary_cross_entropy_with_logits": 4, "binary_cross_entropy": 3, "soft_margin_loss": 2,
    "kl_div": 2, "poisson_nll_loss": 5, "margin_ranking_loss": 4, "hinge_embedding_loss": 3,
    "multilabel_margin_loss": 2, "triplet_margin_loss": 7,
}  # fmt: skip
# The same, of losses with one term a row: operands have one dim more than the others.
_BY_ROW = {"cosine_embedding_loss": 4, "multi_margin_loss": 5}
_CLASSES = frozenset(["cross_entropy_loss", "nll_loss", "nll_loss_nd"])


@dataclass(frozen=True)
class LossForm:
    """`count`: for `targets` the target tensor, for `ratio` the divisor. `even`: the weight is
    right only if all micro-batches count as much."""

    kind: str
    count: fx.Node | None = None
    ignore: int = -100
    even: bool = False


UNKNOWN = LossForm("unknown")


def loss_form(program: Program) -> LossForm:
    """The form of the program's loss."""
    free = {node for node, needs in needs_parameters(program).items() if not needs}
    loss = next(n for n in program.graph.nodes if n.name == program.loss)
    return _form(program, loss, free)


def loss_remedy(program: Program) -> str:
    """What makes a loss of unknown form one that can be told, where that is known; else ''."""
    for node in loss_tail(program):
        if _op_name(node) != "div" or not isinstance(node.args[1], fx.Node):
            continue
        count = node.args[1]
        clamped = _op_name(count) in ("clamp", "clamp_min")
        source = count.args[0] if clamped else None
        if isinstance(source, fx.Node) and _op_name(source) == "sum" and not _is_whole(source):
            return (
                "its count is clamped, which changes a sum of fractions: cast the mask to bool or "
                "int"
            )
    return ""


def loss_tail(program: Program) -> set[fx.Node]:
    """The ops from the reduction over the batch to the loss: they may mix samples."""
    found: set[fx.Node] = set()
    stack = [next(n for n in program.graph.nodes if n.name == program.loss)]
    while stack:
        node = stack.pop()
        value = node.meta.get("val")
        scalar = isinstance(value, torch.Tensor) and not value.dim()
        joined = _op_name(node) == "stack" and all(_is_scalar(n) for n in node.all_input_nodes)
        if node.op == "call_function" and node not in found and (scalar or joined):
            found.add(node)
            stack += node.all_input_nodes
    return found


def _form(program: Program, node: Any, free: set[fx.Node]) -> LossForm:
    name = _op_name(node)
    args = node.args if isinstance(node, fx.Node) else ()
    if name in _SAME:
        return _form(program, args[0], free)
    if name in ("mul", "div") and not isinstance(args[1], fx.Node):
        return _form(program, args[0], free)
    if name == "div" and isinstance(args[1], fx.Node) and _counts_samples(program, args[1]):
        whole = _form(program, args[0], free)
        return LossForm("mean") if whole.kind == "sum" else UNKNOWN
    if name == "div" and isinstance(args[1], fx.Node) and args[1] in free:
        count = _unguarded(args[1])
        top, bottom = _form(program, args[0], free), _form(program, count, free)
        both = top.kind == bottom.kind == "sum"
        return LossForm("ratio", count) if both else UNKNOWN
    if name in ("add", "sub"):
        return _of_sum(program, node, free)
    if name in _CLASSES:
        return _of_classes(program, node, free)
    if name in _ELEMENTWISE or name in _BY_ROW:
        # A column against a row would be every sample against every other.
        ranks = [n.meta["val"].dim() for n in node.all_input_nodes if _has_rows(n)]
        if max(ranks, default=0) - min(ranks, default=0) != (name in _BY_ROW):
            return UNKNOWN
        position = {**_ELEMENTWISE, **_BY_ROW}[name]
        return _reduced(program, args[0], _argument(node, position, "reduction", 1))
    if name in ("sum", "mean") and _is_scalar(args[0]) and len(args) == 1:
        return _form(program, args[0], free)
    if name in ("sum", "mean") and not node.meta["val"].dim():
        parts = args[0].all_input_nodes if isinstance(args[0], fx.Node) else []
        if _op_name(args[0]) == "stack" and all(_is_scalar(n) for n in parts):
            return reduce(_joined, (_form(program, n, free) for n in parts))
        return _reduced(program, args[0], 2 if name == "sum" else 1)
    return UNKNOWN


def _of_sum(program: Program, node: fx.Node, free: set[fx.Node]) -> LossForm:
    """Terms of a sum or difference; `alpha` scales the second."""
    terms = node.args[:2]
    numbers = [t for t in terms if not isinstance(t, fx.Node)]
    if numbers:
        # sum([a, b]) begins with 0; another constant may be added where the weights sum to 1.
        whole = _form(program, terms[0], free)
        return whole if numbers == [0] or whole.kind != "sum" else UNKNOWN
    rest = [t for t in terms if not _is_zero(t)]  # a total may start as torch.zeros(())
    if len(rest) < 2:
        return _form(program, rest[0], free) if rest else UNKNOWN
    apart = [t for t in rest if not _without_samples(program, t)]
    if len(apart) == 1:
        whole = _form(program, apart[0], free)
        return whole if whole.kind != "sum" else UNKNOWN
    return _joined(*(_form(program, t, free) for t in rest))


def _joined(first: LossForm, second: LossForm) -> LossForm:
    if first == second:
        return first
    plain = {replace(f, even=False) for f in (first, second) if f.kind != "mean"}
    if UNKNOWN in plain or any(f.kind == "sum" for f in plain) or len(plain) != 1:
        return UNKNOWN
    return replace(plain.pop(), even=True)


def _without_samples(program: Program, term: Any) -> bool:
    """Whether a term is the same for every part of the batch: neither samples, nor their number,
    nor random numbers go into it, but by statistics that are summed over the whole batch."""
    if not _is_scalar(term):
        return False
    inputs = {i.name for i in program.of_kind("input") if i.batch_dim >= 0}
    summed = {n for n in program.graph.nodes if n.name in program.batch_statistics}
    found = ancestors(program.graph, [term], until=summed)
    return not any(n.name in inputs or draws(n) for n in found - summed)


def _op_name(node: Any) -> str:
    return str(getattr(getattr(node, "target", None), "_opname", ""))


def _is_scalar(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    by_sample = _op_name(node) in _CLASSES and not _argument(node, 3, "reduction", 1)
    return isinstance(value, torch.Tensor) and not value.dim() and not by_sample


def _is_zero(node: Any) -> bool:
    return _is_scalar(node) and _op_name(node) in ("zeros", "new_zeros", "zeros_like")


def _has_rows(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _unguarded(count: fx.Node) -> fx.Node:
    """The count that `guard-empty-mean`, or the model by clamp(min=1), keeps from being 0."""
    name, source = _op_name(count), count.args[0] if count.args else None
    if not isinstance(source, fx.Node):
        return count
    if name == "masked_fill" and count.args[2] == 1:
        mask = count.args[1]
        return source if isinstance(mask, fx.Node) and mask.args == (source, 0) else count
    if name in ("clamp", "clamp_min"):
        least = _argument(count, 1, "min", None)
        free_above = name == "clamp_min" or _argument(count, 2, "max", None) is None
        small = isinstance(least, int | float) and 0 < least <= 1
        return source if small and free_above and _is_whole(source) else count
    return count


def _is_whole(node: Any) -> bool:
    """Whether a tensor holds whole numbers, as counts of a mask do also in a floating dtype."""
    if not isinstance(node, fx.Node):
        return isinstance(node, int)
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not value.is_floating_point():
        return not value.is_complex()
    if _op_name(node) in _SAME or _op_name(node) == "sum":
        return _is_whole(node.args[0])
    return _op_name(node) in ("add", "sub", "mul") and all(map(_is_whole, node.args[:2]))


def _counts_samples(program: Program, divisor: fx.Node) -> bool:
    """Whether a divisor is the size of the batch, times a constant."""
    symbol, size = program.symbols.get("batch"), divisor.meta.get("val")
    if symbol is None or not isinstance(size, torch.SymInt):
        return False
    return not (size.node.expr / symbol).has(symbol)


def _of_classes(program: Program, node: fx.Node, free: set[fx.Node]) -> LossForm:
    """Cross entropy and negative log likelihood; class weights change what is counted."""
    target = node.args[1]
    reduction = _argument(node, 3, "reduction", 1)
    if _argument(node, 2, "weight", None) is not None or not isinstance(target, fx.Node):
        return UNKNOWN
    if target.meta["val"].is_floating_point() or reduction == 2:
        return _reduced(program, target, reduction)
    if reduction != 1 or target not in free:
        return UNKNOWN
    return LossForm("targets", target, int(_argument(node, 4, "ignore_index", -100)))


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _reduced(program: Program, source: Any, reduction: Any) -> LossForm:
    """Over elements of which every sample has as many: the first dim is made of the batch."""
    if _op_name(source) in _CLASSES and not _argument(source, 3, "reduction", 1):
        # One loss for each target; torch.export tells their number wrongly on meta.
        source = source.args[1]
    value = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.dim() or reduction not in (1, 2):
        return UNKNOWN
    size: Any = value.shape[0]
    symbol = program.symbols.get("batch")
    if symbol is not None:
        expr = size.node.expr if isinstance(size, torch.SymInt) else None
        batched = expr is not None and not (expr / symbol).has(symbol)
    else:
        # Sizes tell little then: it must come from the samples, and a sum may have been divided by
        # the batch size as a number.
        inputs = {i.name for i in program.of_kind("input") if i.batch_dim == 0}
        from_samples = any(n.name in inputs for n in ancestors(program.graph, [source]))
        batched = size % program.sizes["batch"] == 0 and from_samples and reduction == 1
    if not batched:
        return UNKNOWN
    return LossForm("mean" if reduction == 1 else "sum")
