"""What the front passes refuse, and what sizes a program has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autopar.api import search_plan
from autopar.errors import CaptureError, UsageError
from autopar.passes.capture import capture
from autopar.workflow.prepare import prepare


class Net(nn.Module):
    """`used`: its loss depends on the layer."""

    def __init__(self, layers: nn.Module | None, used: bool = True) -> None:
        super().__init__()
        self.layers, self.used = layers, used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.layers is None or not self.used:
            return x.square().mean()
        return torch.as_tensor(self.layers(x).square().mean())


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Net(None), "it has no parameters"),
        (
            Net(nn.Linear(4, 4).requires_grad_(False)),
            "all of its 2 parameters have requires_grad=False",
        ),
        (Net(nn.Linear(4, 4), used=False), "its loss does not depend on layers.weight"),
    ],
)
def test_a_step_that_trains_nothing_is_refused(model: nn.Module, why: str) -> None:
    program = capture(model, {"x": torch.randn(4, 4)}, name="net")
    with pytest.raises(CaptureError, match="a step of net trains nothing") as error:
        prepare(program, program.sizes)
    assert why in str(error.value) and "requires_grad=True" in str(error.value)


@pytest.mark.parametrize(
    ("layer", "shape", "sequence"),
    [
        (nn.Conv2d(3, 3, 1), (2, 3, 8, 8), None),
        (nn.Linear(6, 6), (2, 6), None),
        (nn.Linear(6, 6), (2, 5, 6), 5),
    ],
    ids=["image", "features", "sequence"],
)
def test_dim_1_is_a_sequence_where_it_counts_positions(
    layer: nn.Module, shape: tuple[int, ...], sequence: int | None
) -> None:
    program = capture(Net(layer), {"x": torch.randn(*shape)}, name="net")
    assert program.sizes.get("sequence") == sequence
    assert prepare(program, program.sizes).sizes.get("sequence") == sequence


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"precision": "fp8"}, "precision=fp8"),
        ({"sequence": 0}, "a sequence of 0"),
        ({"pins": {"tp": 2}}, "pins are of type dict"),
    ],
)
def test_requests_that_mean_nothing(asked: dict[str, Any], why: str) -> None:
    example = {"x": torch.randn(2, 5, 6)}
    with pytest.raises(UsageError, match=why):
        search_plan(
            *(Net(nn.Linear(6, 6)), "cpu:2"),
            example_inputs=example,
            global_batch_size=4,
            **asked,
        )
