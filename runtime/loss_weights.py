"""Weights that turn per-microbatch mean losses into the mean over the whole batch.

A mean over n of N targets contributes with n / N, so labels that are ignored unevenly over
microbatches and ranks give exactly the loss and gradients of one device. A loss that is no such
mean counts each microbatch alike.
"""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensor

from autopar.errors import PlanError
from autopar.stage_program import StageProgram

Tensor = torch.Tensor


def count_targets(program: StageProgram, microbatches: list[dict[str, Tensor]]) -> list[float]:
    """Targets in each of this rank's microbatches (empty when the stage does not count).

    Raises `PlanError` where weights of both signs cancel out: the mean of such a part is undefined,
    but what it adds to the whole loss is not 0.
    """
    if program.count is None:
        return []
    counts, least = [], []
    with torch.no_grad():
        for batch in microbatches:
            result = program.count(*(batch[name] for name in program.count_inputs))
            total, *more = result if isinstance(result, tuple | list) else (result,)
            counts.append(total)
            least += more
    if any(isinstance(count, FakeTensor) for count in counts):  # a dry run has no labels
        return [1.0] * len(counts)
    found = torch.stack([c.double() for c in (*counts, *least)]).tolist()
    numbers, lowest = found[: len(counts)], found[len(counts) :]
    if any(n == 0 and low < 0 for n, low in zip(numbers, lowest, strict=False)):
        raise PlanError(
            "the weights of a part of the batch add up to 0, though some are negative",
            next_step="plan with the batch whole (dp=1,microbatches=1), or shuffle the batch",
        )
    return [float(number) for number in numbers]


def loss_weights(
    counts: list[float], total: float, microbatches: int, dp: int, *, sums: bool = False
) -> list[float]:
    """One weight per microbatch; over all microbatches and dp ranks they sum to 1 (`sums`: all 1).

    `counts` empty: every microbatch alike. Raises `PlanError` when there are counts but no target.
    """
    if sums:
        return [1.0] * microbatches
    if not counts:
        return [1.0 / (microbatches * dp)] * microbatches
    if total == 0:
        raise no_targets()
    return [count / total for count in counts]


def uneven(counts: list[float], total: float, microbatches: int, dp: int) -> PlanError | None:
    """The error of a loss that adds a mean over targets and one over samples, where this rank's
    micro-batches don't have an equal part of all targets: no weight is right for both."""
    if all(count * microbatches * dp == total for count in counts):
        return None
    return PlanError(
        "the loss adds a mean over targets and a mean over all samples, and the parts of this "
        f"batch have {', '.join(f'{c:g}' for c in counts)} of {total:g} targets",
        next_step="plan with the batch whole (dp=1,microbatches=1), let both means leave out the "
        "ignored targets, or give every sample as many targets",
    )


def no_targets() -> PlanError:
    return PlanError(
        "the batch has no target: every label is the ignored one, so the mean loss is undefined",
        next_step="skip this batch, or check the labels and the ignored index",
    )


def weighted(loss: Tensor, weight: Tensor) -> Tensor:
    """loss * weight in float32; a weight of 0 gives 0 also for a mean over nothing (NaN)."""
    wide = loss.double() if loss.dtype == torch.float64 else loss.float()
    scale = weight.to(wide.dtype).reshape(())
    return torch.where(scale == 0, torch.zeros_like(wide), wide.reshape(()) * scale)
