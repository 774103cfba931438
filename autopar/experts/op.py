"""`autopar::experts`: what all experts of a layer make of the tokens that were sent to them.

    hidden[t, h], index[t, k], weights[t, k]  ->  [t, h]

    row of token t and its choice j:  weights[t, j] * down(f(up(hidden[t])))  of expert index[t, j]

`up` is [e, w, h], `down` [e, h, i] (with `transposed`: [e, h, w] and [e, i, h]); `gate`, where it
is an operand of its own, stands before `up` in what the function f reads. f is a text, see
`autopar.experts.activation`. Biases are [e, w], [e, w] and [e, h]. `experts` is how many there
are, `first` the first of those that are operands here: choices of others add nothing to the result.
Where rows may be dropped there is one expert more, which is on no rank. `spread`: 1, or over how
many ranks the tokens are spread whose rows come here; then it is a shape that is asked for, on meta
(`autopar.runtime.exchanged_experts` computes it).

The backward keeps the operands, the rows as projected by gate and up, and which row is whose; the
product before `down` and what it makes are computed again, or not needed: the gradient of a weight
follows from the product before `down`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from autopar.experts.activation import evaluate
from autopar.experts.assumed_rows import assumed_rows
from autopar.experts.exchange import exchanged
from autopar.experts.grouped_matmul import Groups, gather, has_values, multiply
from autopar.experts.operands import SCHEMA, TENSORS, Operands

Tensor = torch.Tensor


@dataclass(frozen=True)
class Routing:
    """Rows sorted by expert. `order[row]`: its place in `index` read row by row; `expert[row]`:
    of the experts that are here."""

    order: Tensor
    expert: Tensor
    groups: Groups
    choices: int

    @property
    def token(self) -> Tensor:
        return self.order // self.choices


def route(index: Tensor, here: int, experts: int, first: int) -> Routing:
    """Which rows the experts `first` to `first + here` of `experts` get.

    Without values it is taken to be their share. Raises `IndexError` on the CPU for an index that
    no expert has.
    """
    flat = index.reshape(-1)
    if not has_values(index):
        whole = flat.shape[0]
        # Shares of ranks are below the whole; a rank that has all experts gets all rows.
        rows = whole if here == experts else min(whole, assumed_rows(whole * here // experts))
        order = flat.new_empty((rows,), dtype=torch.int64)
        ends = flat.new_empty((here,), dtype=torch.int32)
        return Routing(order, torch.empty_like(order), Groups(ends), index.shape[-1])
    if index.device.type == "cpu" and flat.numel():
        low, high = int(flat.min()), int(flat.max())
        if low < 0 or high >= experts:
            wrong = low if low < 0 else high
            raise IndexError(f"expert {wrong} is chosen, there are {experts}")
    local = flat - first
    local = torch.where((local >= 0) & (local < here), local, here)
    expert, order = torch.sort(local, stable=True)
    numbers = torch.arange(here, device=index.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, numbers, right=True).to(torch.int32)
    if here < experts:
        rows = int(ends[-1])
        expert, order = expert[:rows], order[:rows]
    return Routing(order, expert, Groups(ends), index.shape[-1])


def project(rows: Tensor, given: Operands, groups: Groups, expert: Tensor, transposed: bool) -> Any:
    """The rows as projected by gate (if there is one) and up: [s, w] each."""
    pairs = [(given.gate, given.gate_bias)] if given.gate is not None else []
    parts = []
    for matrix, bias in [*pairs, (given.up, given.up_bias)]:
        assert matrix is not None
        part = multiply(rows, matrix if transposed else matrix.mT, groups)
        parts.append(part if bias is None else part.add_(bias[expert]))
    return parts


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        given = Operands(*inputs[:TENSORS])
        experts, first, ctx.transposed, ctx.text = inputs[TENSORS:]
        routing = route(given.chosen, given.up.shape[0], experts, first)
        if given.hidden.is_meta:
            sizes = [m.shape[1 + ctx.transposed] for m in (given.gate, given.up) if m is not None]
            rows = routing.order.shape[0]
            parts = [given.hidden.new_empty((rows, size)) for size in sizes]
            result = torch.empty_like(given.hidden)
        else:
            parts, result = _forward(given, routing, ctx.transposed, ctx.text)
        kept = [given.hidden, given.weights, *given[3:], routing.order]
        kept.append(routing.expert if given.up_bias is not None else None)
        kept.append(routing.groups.ends)
        ctx.save_for_backward(*kept, *parts)
        ctx.choices = routing.choices
        return result

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, weights, *rest = ctx.saved_tensors
        given = Operands(hidden, weights, weights, *rest[:6])
        order, expert, ends, *parts = rest[6:]
        routing = Routing(order, expert, Groups(ends), ctx.choices)
        wanted = Operands(*ctx.needs_input_grad[:TENSORS])
        found = _backward(grad, given, routing, parts, wanted, ctx.transposed, ctx.text)
        return (*found, None, None, None, None)


def _forward(
    given: Operands, routing: Routing, transposed: bool, text: str
) -> tuple[list[Tensor], Tensor]:
    rows = given.hidden[routing.token]
    parts = project(rows, given, routing.groups, routing.expert, transposed)
    del rows
    made = evaluate(text, parts)
    made = multiply(made, given.down if transposed else given.down.mT, routing.groups)
    if given.down_bias is not None:
        made += given.down_bias[routing.expert]
    scaled = made * given.weights.reshape(-1)[routing.order].unsqueeze(-1)
    del made
    return parts, _combine(scaled, routing, given.hidden.shape[0]).to(given.hidden.dtype)


def _combine(rows: Tensor, routing: Routing, tokens: int) -> Tensor:
    """The sum of each token's rows: [s, h] -> [t, h]."""
    if rows.shape[0] == tokens * routing.choices:
        sorted_back = torch.empty_like(rows)
        sorted_back[routing.order] = rows
        return sorted_back.view(tokens, routing.choices, rows.shape[1]).sum(1)
    result = rows.new_zeros((tokens, rows.shape[1]))
    return result.index_add_(0, routing.token, rows)


def _backward(
    grad: Tensor,
    given: Operands,
    routing: Routing,
    parts: list[Tensor],
    wanted: Operands,
    transposed: bool,
    text: str,
) -> list[Tensor | None]:
    groups, token = routing.groups, routing.token
    gradients: dict[str, Tensor] = {}
    of_rows = grad[token]
    with torch.enable_grad():
        leaves = [p.detach().requires_grad_() for p in parts]
        made = evaluate(text, leaves)
    # Before the weights: what it is for a row's weight is left to be multiplied.
    before = multiply(of_rows, given.down.mT if transposed else given.down, groups)
    scale = given.weights.reshape(-1)[routing.order].unsqueeze(-1)
    if wanted.weights:
        each = (before * made.detach()).sum(-1, dtype=_wide(before))
        if given.down_bias is not None:
            each += (of_rows * given.down_bias[routing.expert]).sum(-1, dtype=each.dtype)
        flat = torch.zeros_like(given.weights).reshape(-1)
        flat[routing.order] = each.to(flat.dtype)
        gradients["weights"] = flat.view_as(given.weights)
    of_rows = (of_rows * scale).to(of_rows.dtype)
    if wanted.down:
        pair = (made.detach(), of_rows) if transposed else (of_rows, made.detach())
        gradients["down"] = gather(*pair, groups)
    if given.down_bias is not None and wanted.down_bias:
        gradients["down_bias"] = _per_expert(of_rows, given.down_bias, routing.expert)
    del of_rows
    before = (before * scale).to(before.dtype)
    of_parts = torch.autograd.grad(made, leaves, before)
    del made, before, leaves
    _to_projections(gradients, list(of_parts), given, routing, wanted, transposed)
    return [gradients.get(name) for name in Operands._fields]


def _to_projections(
    gradients: dict[str, Tensor],
    of_parts: list[Tensor],
    given: Operands,
    routing: Routing,
    wanted: Operands,
    transposed: bool,
) -> None:
    """From the gradients of the projected rows to those of gate, up, their biases and hidden."""
    names = ["gate", "up"] if given.gate is not None else ["up"]
    rows = given.hidden[routing.token] if any(getattr(wanted, n) for n in names) else None
    of_hidden: Tensor | None = None
    for name, part in zip(names, of_parts, strict=True):
        matrix, bias = getattr(given, name), getattr(given, f"{name}_bias")
        if getattr(wanted, name) and rows is not None:
            pair = (rows, part) if transposed else (part, rows)
            gradients[name] = gather(*pair, routing.groups)
        if bias is not None and getattr(wanted, f"{name}_bias"):
            gradients[f"{name}_bias"] = _per_expert(part, bias, routing.expert)
        if wanted.hidden:
            made = multiply(part, matrix.mT if transposed else matrix, routing.groups)
            of_hidden = made if of_hidden is None else of_hidden.add_(made)
    if of_hidden is not None:
        gradients["hidden"] = _combine(of_hidden, routing, given.hidden.shape[0])


def _per_expert(rows: Tensor, like: Tensor, expert: Tensor) -> Tensor:
    """The sum of each expert's rows, added up in float32 at least."""
    total = torch.zeros_like(like, dtype=_wide(rows))
    return total.index_add_(0, expert, rows.to(total.dtype)).to(like.dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _experts(*inputs: Any) -> Tensor:
    *tensors, experts, first, spread, transposed, activation = inputs
    given = Operands(*tensors)
    if spread > 1:
        assert given.hidden.is_meta, "rows of other ranks can't come here"
        return exchanged(given, experts, transposed, activation, spread, None)
    inputs = (*tensors, experts, first, transposed, activation)
    result: Tensor = _Experts.apply(*inputs)  # type: ignore[no-untyped-call]
    return result


# Any: methods of `Library` are not annotated. A fragment: the namespace has other ops elsewhere.
_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    f"experts{SCHEMA}int first, int spread, bool transposed, str activation) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl("experts", _experts, "Autograd")
_LIBRARY.impl("experts", _experts, "CompositeExplicitAutograd")
torch.library.register_fake(
    "autopar::experts", lambda hidden, *rest: torch.empty_like(hidden), lib=_LIBRARY
)
