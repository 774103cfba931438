"""Writes that the gradient must not see are refused; all others are none of these."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.passes.capture import capture

X = torch.randn(4, 4)


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return (self.function(self.inner(x)) ** 2).sum()


def without_gradient(z: Tensor) -> Tensor:
    with torch.no_grad():
        z.clamp_(-0.1, 0.1)
    return z


def a_row_without_gradient(z: Tensor) -> Tensor:
    out = torch.zeros(4, 4, device=z.device)
    out[:, 1] = z[:, 0]
    with torch.no_grad():
        out[:, 2] = 3
    return out


def through_detach(z: Tensor) -> Tensor:
    z.detach().clamp_(-0.1, 0.1)
    return z


def through_data(z: Tensor) -> Tensor:
    z.data.clamp_(-0.1, 0.1)
    return z


@pytest.mark.parametrize(
    "function", [without_gradient, a_row_without_gradient, through_detach, through_data]
)
def test_refused_at_the_line(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError) as info:
        capture(Model(function), {"x": X})
    assert "without its gradient" in info.value.message and __file__ in info.value.message
    assert ".detach()" in info.value.next_step


def a_new_tensor(z: Tensor) -> Tensor:
    kept = torch.zeros_like(z)
    with torch.no_grad():
        kept.add_(z)
        kept[:, 0] = 2
    return z * kept


def with_gradient(z: Tensor) -> Tensor:
    out = torch.zeros(4, 4, device=z.device)
    out[:, 1] = z[:, 0]
    out[0].mul_(2)
    out.zero_()
    return out + z.clamp_(-0.1, 0.1)


def a_detached_copy(z: Tensor) -> Tensor:
    return z * z.detach().clone().clamp_(-0.1, 0.1)


def read_as_data(z: Tensor) -> Tensor:
    return z / z.data.abs().amax(1, keepdim=True)


@pytest.mark.parametrize("function", [a_new_tensor, with_gradient, a_detached_copy, read_as_data])
def test_other_writes_are_captured_exactly(function: Callable[[Tensor], Tensor]) -> None:
    model = Model(function)
    program = capture(model, {"x": X})
    values = {**dict(model.named_parameters()), "x": X}
    for node in program.graph.nodes:  # what the model makes itself is made where the values are
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": "cpu"}
    program.graph_module.recompile()
    (loss,) = program.graph_module(*(values[i.target] for i in program.inputs))
    expected = model(X)
    torch.testing.assert_close(loss, expected)
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(expected, parameters)
    )
