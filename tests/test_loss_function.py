"""Which scalar is trained, and which inputs a loss function gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import CaptureError, UsageError
from autopar.loss_function import loss_of

ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)


def returns(value: Any) -> Any:
    return lambda x: value


@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None


@pytest.mark.parametrize(
    "outputs",
    [
        ONE,
        (torch.ones(3), ONE, TWO),
        {"aux": TWO, "loss": ONE},
        {"logits": torch.ones(3), "total": ONE},
        Output(torch.ones(3), ONE),
    ],
)
def test_the_loss_of_an_output(outputs: Any) -> None:
    assert loss_of(returns(outputs), {"x": ONE}) is ONE


def test_several_scalars_and_no_loss_is_ambiguous() -> None:
    with pytest.raises(CaptureError, match="several scalars, a, b") as info:
        loss_of(returns({"a": ONE, "b": TWO}), {"x": ONE})
    assert "loss_fn" in info.value.next_step


@pytest.mark.parametrize("outputs", [torch.ones(3), Output(torch.ones(3), None), [torch.ones(2)]])
def test_no_scalar_says_what_there_is(outputs: Any) -> None:
    with pytest.raises(CaptureError, match="returns") as info:
        loss_of(returns(outputs), {"x": ONE})
    assert "loss_fn" in info.value.next_step


def test_inputs_go_where_they_are_named() -> None:
    def model(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x * mask

    def loss(outputs: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (outputs - labels).mul(mask).sum()

    inputs = {"x": torch.ones(3), "mask": torch.tensor([1.0, 0, 1]), "labels": torch.zeros(3)}
    assert float(loss_of(model, inputs, loss)) == 2.0


def test_a_model_with_any_keywords_gets_what_the_loss_leaves() -> None:
    def model(*args: Any, **inputs: torch.Tensor) -> torch.Tensor:
        assert set(inputs) == {"x"}
        return inputs["x"]

    inputs = {"x": torch.ones(3), "labels": torch.zeros(3)}
    assert float(loss_of(model, inputs, _mse)) == 1.0


def _mse(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, labels)


def test_a_missing_input_of_the_loss_is_named() -> None:
    with pytest.raises(UsageError, match="'labels'"):
        loss_of(returns(torch.ones(3)), {"x": ONE}, _mse)


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    with pytest.raises(CaptureError, match="shape \\[3\\]"):
        loss_of(returns(torch.ones(3)), {"x": ONE}, lambda out: out)
