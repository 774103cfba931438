"""Tokens and experts both split over ranks: rows travel to their experts and back (dropless).

    hidden[t/n, h] -> rows by expert -> all_to_all -> experts here -> all_to_all -> [t/n, h]

in four steps, so that other work can run while something travels:

    announce   sorts rows by expert; ranks begin to tell each other how many rows each expert gets
    dispatch   learns that, which is the one time that the host waits for the device; rows leave
    process    rows arrive, experts compute, what they made leaves
    collect    it arrives, and each token's rows are summed

The backward goes the same way back: where a step sends, its gradient is waited for, and the other
way round, so what autograd runs between the backwards of two steps runs while gradients travel. The
weights of the rows travel along, so that nothing of what the experts make is kept for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from autopar.experts.journey import Journey
from autopar.experts.operands import Operands

Tensor = torch.Tensor
# Tokens and choices of each.
Sizes = tuple[int, int]
Move = Callable[[Tensor, Tensor, Sizes], Tensor]
ROWS, WEIGHTS, MADE = "rows", "weights", "made"


class Announced(NamedTuple):
    """`order[row]`: place in `index`, read row by row, of each row; those that are dropped last."""

    rows: Tensor
    weights: Tensor
    order: Tensor
    journey: Journey


class Dispatched(NamedTuple):
    """Rows on their way to their experts. `expert[row]`: of this rank's experts, for each that
    comes; `order`: of the rows that were sent."""

    rows: Tensor
    weights: Tensor
    expert: Tensor
    order: Tensor
    journey: Journey


class Processed(NamedTuple):
    """What experts made on its way back."""

    rows: Tensor
    order: Tensor
    journey: Journey


def announce(
    hidden: Tensor, index: Tensor, weights: Tensor, up: Tensor, experts: int, ranks: int, group: Any
) -> Announced:
    """`up`: weights of this rank's experts, which tell how many they are. `experts`: how many an
    index may name, of which one may be on no rank. `group` may be None for shapes alone.

    Raises `IndexError` on the CPU for an index that no expert has.
    """
    sizes = (index.shape[0], index.shape[1])
    journey = Journey(index.numel(), up.shape[0], ranks, group)
    order = journey.announce(index, experts - 1)
    rows = _applied(_Leave, _spread, _join, hidden, order, sizes, journey, ROWS)
    weights = _applied(_Leave, _pick, _put, weights, order, sizes, journey, WEIGHTS)
    journey.packed()
    return Announced(rows, weights, order, journey)


def dispatch(announced: Announced) -> Dispatched:
    rows, weights, order, journey = announced
    expert = journey.learn(order)
    rows = _applied(_Depart, rows, journey, ROWS)
    weights = _applied(_Depart, weights, journey, WEIGHTS)
    return Dispatched(rows, weights, expert, order[: sum(journey.sent)], journey)


def process(
    dispatched: Dispatched,
    up: Tensor,
    down: Tensor,
    gate: Tensor | None,
    up_bias: Tensor | None,
    gate_bias: Tensor | None,
    down_bias: Tensor | None,
    transposed: bool,
    activation: str,
) -> Processed:
    """See `autopar.experts.op` for the operands."""
    rows, weights, expert, order, journey = dispatched
    rows = _applied(_Arrive, rows, journey, ROWS)
    weights = _applied(_Arrive, weights, journey, WEIGHTS)
    held = (up, down, gate, up_bias, gate_bias, down_bias)
    rest = (up.shape[0], 0, 1, transposed, activation)
    made = torch.ops.autopar.experts(rows, expert.unsqueeze(1), weights.unsqueeze(1), *held, *rest)
    return Processed(_applied(_Return, made, journey), order, journey)


def collect(processed: Processed, index: Tensor) -> Tensor:
    rows, order, journey = processed
    return _applied(_Collect, rows, order, (index.shape[0], index.shape[1]), journey)


def exchanged(
    given: Operands, experts: int, transposed: bool, activation: str, ranks: int, group: Any
) -> Tensor:
    """What all experts make of this rank's tokens, one step right after the other."""
    tokens = (given.hidden, given.chosen, given.weights)
    announced = announce(*tokens, given.up, experts, ranks, group)
    processed = process(dispatch(announced), *given[3:], transposed, activation)
    return collect(processed, given.chosen)


def _applied(function: Any, *inputs: Any) -> Tensor:
    result: Tensor = function.apply(*inputs)
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


def _pick(values: Tensor, order: Tensor, sizes: Sizes) -> Tensor:
    """[t, k] -> [s]"""
    return values.new_empty(order.shape) if values.is_meta else values.reshape(-1)[order]


def _put(rows: Tensor, order: Tensor, sizes: Sizes) -> Tensor:
    """[s] -> [t, k], zero for what was dropped."""
    values = rows.new_zeros((sizes[0] * sizes[1],))
    if not rows.is_meta:
        values[order] = rows
    return values.view(sizes)


class _Leave(torch.autograd.Function):
    """The rows of tokens; the gradient arrives here, of those rows that were sent."""

    @staticmethod
    def forward(
        ctx: Any,
        there: Move,
        back: Move,
        values: Tensor,
        order: Tensor,
        sizes: Sizes,
        journey: Journey,
        what: str,
    ) -> Tensor:
        ctx.save_for_backward(order)
        ctx.rest = back, sizes, journey, what
        return there(values, order, sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (order,) = ctx.saved_tensors
        back, sizes, journey, what = ctx.rest
        sent = sum(journey.sent)
        rows = journey.arrive(what)[:sent]
        return None, None, back(rows, order[:sent], sizes), None, None, None, None


class _Depart(torch.autograd.Function):
    """To the ranks of the experts. The gradient is on its way still, and goes on to `_Leave`: what
    ran between the two forward comes before that."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey, what: str) -> Tensor:
        ctx.rest = journey, what
        return journey.depart(what, rows[: sum(journey.sent)], there=True, first=True)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        journey, what = ctx.rest
        return journey.under_way(what), None, None


class _Arrive(torch.autograd.Function):
    """At the experts; the gradient leaves. Between the two it is the journey that holds what will
    arrive, as gradients have the shapes of the values."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey, what: str) -> Tensor:
        ctx.rest = journey, what
        journey.arrive(what)
        return rows.view_as(rows)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        journey, what = ctx.rest
        journey.depart(what, grad, there=False, room=journey.rows)
        return grad, None, None


class _Return(torch.autograd.Function):
    """Back to the ranks of the tokens; the gradient arrives."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return journey.depart(MADE, rows, there=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return ctx.journey.arrive(MADE), None


class _Collect(torch.autograd.Function):
    """The sum of each token's rows; the gradient leaves."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, sizes: Sizes, journey: Journey) -> Tensor:
        ctx.save_for_backward(order)
        ctx.rest = sizes, journey
        journey.arrive(MADE)
        return _join(rows, order, sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (order,) = ctx.saved_tensors
        sizes, journey = ctx.rest
        rows = _spread(grad, order, sizes)
        journey.depart(MADE, rows, there=True)
        return rows, None, None, None
