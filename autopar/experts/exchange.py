"""Tokens and experts both split over ranks: rows travel to their experts and back (dropless).

    hidden[t/n, h] -> rows by expert -> all_to_all -> experts here -> all_to_all -> [t/n, h]

Ranks first tell each other how many rows each expert gets, which is the one time that the host
waits for the device. The weights of the rows travel along, so that nothing of what the experts make
is kept for the backward, which goes the same way back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.experts.assumed_rows import assumed_rows
from autopar.experts.grouped_matmul import has_values
from autopar.experts.operands import Operands

Tensor = torch.Tensor
# Tokens and choices of each.
Sizes = tuple[int, int]
Move = Callable[[Tensor, Tensor, Sizes], Tensor]


@dataclass(frozen=True)
class Exchange:
    """`order[row]`: place in `index`, read row by row, of each row that is sent. `sent` and
    `received`: rows to and from each rank. `expert[row]`: of this rank's experts, for each received
    row."""

    order: Tensor
    sent: list[int]
    received: list[int]
    expert: Tensor


def agree_on_rows(index: Tensor, here: int, ranks: int, group: Any, last: int) -> Exchange:
    """Which rows go where. Without values the exchange is taken to be even.

    Choices of experts that no rank has, up to `last`, are dropped: they go nowhere. Raises
    `IndexError` on the CPU for an index above it.
    """
    flat = index.reshape(-1)
    experts = here * ranks
    if not has_values(index):
        rows = flat.shape[0]
        even = [rows // ranks + (r < rows % ranks) for r in range(ranks)]
        order = flat.new_empty((rows,), dtype=torch.int64)
        received = [assumed_rows(count) for count in even]
        expert = flat.new_empty((sum(received),), dtype=torch.int64)
        return Exchange(order, even, received, expert)
    if index.device.type == "cpu" and flat.numel():
        low, high = int(flat.min()), int(flat.max())
        if low < 0 or high > last:
            wrong = low if low < 0 else high
            raise IndexError(f"expert {wrong} is chosen, there are {experts}")
    expert, order = torch.sort(flat, stable=True)
    numbers = torch.arange(experts, device=index.device, dtype=expert.dtype)
    ends = torch.searchsorted(expert, numbers, right=True)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    incoming = torch.empty_like(counts)
    dist.all_to_all_single(incoming, counts, group=group)
    totals = torch.stack([counts.view(ranks, here), incoming.view(ranks, here)]).sum(-1)
    sent, received = totals.tolist()
    mine = torch.arange(here, device=index.device).repeat(ranks)
    order = order[: sum(sent)]
    return Exchange(
        order, sent, received, mine.repeat_interleave(incoming, output_size=sum(received))
    )


def exchanged(
    given: Operands, experts: int, transposed: bool, activation: str, ranks: int, group: Any
) -> Tensor:
    """What all experts make of this rank's tokens. `experts`: how many an index may name, of which
    one may be on no rank. `group` may be None for shapes alone."""
    here = given.up.shape[0]
    plan = agree_on_rows(given.chosen, here, ranks, group, experts - 1)
    sizes = tuple(given.chosen.shape)
    rows = _applied(_Placed, _spread, _join, given.hidden, plan.order, sizes)
    weights = given.weights.reshape(-1)[plan.order]
    there = (plan.sent, plan.received, group)
    back = (plan.received, plan.sent, group)
    rows = _applied(_Travel, rows, *there)
    weights = _applied(_Travel, weights, *there)
    index, weights = plan.expert.unsqueeze(1), weights.unsqueeze(1)
    made = torch.ops.autopar.experts(
        rows, index, weights, *given[3:], here, 0, 1, transposed, activation
    )
    made = _applied(_Travel, made, *back)
    return _applied(_Placed, _join, _spread, made, plan.order, sizes)


def _applied(function: Any, *inputs: Any) -> Tensor:
    result: Tensor = function.apply(*inputs)
    return result


def _move(rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    if group is not None:
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=group)
    return result


def _spread(values: Tensor, order: Tensor, sizes: Sizes) -> Tensor:
    """[t, h] -> [s, h]: each token once for each choice that goes somewhere, as in `order`."""
    if values.is_meta:
        return values.new_empty((order.shape[0], *values.shape[1:]))
    return values[order // sizes[1]]


def _join(rows: Tensor, order: Tensor, sizes: Sizes) -> Tensor:
    """[s, h] -> [t, h]: the sum of each token's rows."""
    tokens, choices = sizes
    if rows.is_meta:
        return rows.new_empty((tokens, *rows.shape[1:]))
    shape = (tokens * choices, rows.shape[1])
    # What was dropped has no row.
    sorted_back = rows.new_empty(shape) if len(order) == shape[0] else rows.new_zeros(shape)
    sorted_back[order] = rows
    return sorted_back.view(tokens, choices, rows.shape[1]).sum(1)


class _Travel(torch.autograd.Function):
    """To the ranks of the experts; the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.back = received, sent, group
        return _move(rows, sent, received, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return _move(grad, *ctx.back), None, None, None


class _Placed(torch.autograd.Function):
    """`_spread` or `_join`: each is the gradient of the other."""

    @staticmethod
    def forward(
        ctx: Any, there: Move, back: Move, values: Tensor, order: Tensor, sizes: Sizes
    ) -> Tensor:
        ctx.save_for_backward(order)
        ctx.back, ctx.sizes = back, sizes
        return there(values, order, sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (order,) = ctx.saved_tensors
        return None, None, ctx.back(grad, order, ctx.sizes), None, None
