"""Weights make the mean over the batch of means over microbatches."""

from __future__ import annotations

import pytest
import torch

from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.runtime.loss_weights import count_targets, loss_weights, uneven, weighted
from tests.runtime.toy import IGNORED, make_batch, make_plan, make_stages


def test_counts_of_each_microbatch() -> None:
    (stage,) = make_stages(make_plan(Mesh()))
    batch = make_batch(4)
    pieces = [{"labels": rows} for rows in batch["labels"].chunk(2)]
    assert count_targets(stage, pieces) == [2.0, 12.0]
    stage.count = None
    assert count_targets(stage, pieces) == []


def test_weights_that_cancel_out_in_a_part_are_refused() -> None:
    (stage,) = make_stages(make_plan(Mesh()))
    stage.count_inputs = ("w",)

    def parts(*rows: list[float]) -> list[dict[str, torch.Tensor]]:
        return [{"w": torch.tensor(row)} for row in rows]

    stage.count = lambda w: (w.sum(), w.min())  # type: ignore[assignment]
    assert count_targets(stage, parts([1, 2], [0, 0], [-1, 3])) == [3.0, 0.0, 2.0]
    with pytest.raises(PlanError, match="add up to 0, though some are negative"):
        count_targets(stage, parts([1, 2], [-1, 1]))


def test_weights_sum_to_one() -> None:
    assert loss_weights([2.0, 12.0], 28.0, 2, 2) == [2 / 28, 12 / 28]
    assert loss_weights([], 0.0, 4, 2) == [1 / 8] * 4
    with pytest.raises(PlanError, match="no target"):
        loss_weights([0.0, 0.0], 0.0, 2, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mean_over_nothing_counts_nothing(dtype: torch.dtype) -> None:
    logits = torch.randn(3, 5, dtype=dtype, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(
        logits, torch.full((3,), IGNORED), ignore_index=IGNORED
    )
    assert torch.isnan(loss)
    result = weighted(loss, torch.tensor([0.0]))
    result.backward()
    assert result.item() == 0
    assert result.dtype == torch.float32
    assert logits.grad is not None
    assert not logits.grad.any()


def test_parts_that_count_unequally_are_told() -> None:
    assert uneven([7.0, 7.0], 28.0, 2, 2) is None
    assert uneven([], 28.0, 2, 2) is None  # another stage counts
    error = uneven([7.0, 6.0], 28.0, 2, 2)
    assert error is not None and "7, 6 of 28" in error.message
    # Equal on this rank, less than its part of all.
    assert uneven([6.0, 6.0], 28.0, 2, 2) is not None
