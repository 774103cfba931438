"""Regions without gradient are inlined, and cut the gradient."""

from __future__ import annotations

import torch
from torch import nn

from autopar.passes.capture import capture


class Target(nn.Module):
    """Learns from its own output without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = torch.tanh(self.inner(x))
            largest, _ = target.max(dim=1)
        hidden = self.inner(x)
        return (hidden * target).sum() + largest.sum()


def test_values_and_gradients_are_the_models() -> None:
    model, x = Target(), torch.randn(4, 4)
    program = capture(model, {"x": x})
    assert not [n for n in program.graph.nodes if "wrap_with" in str(n.target)]
    values = {**dict(model.named_parameters()), "x": x}
    (loss,) = program.graph_module(*(values[i.target] for i in program.inputs))
    expected = model(x)
    torch.testing.assert_close(loss, expected)
    parameters = list(model.parameters())
    got = torch.autograd.grad(loss, parameters)
    wanted = torch.autograd.grad(expected, parameters)
    torch.testing.assert_close(got, wanted)


def test_what_stood_in_the_region_needs_no_gradient() -> None:
    program = capture(Target(), {"x": torch.ones(4, 4)})
    inside = [n for n in program.graph.nodes if "tanh" in str(n.target) or "max" in str(n.target)]
    assert inside and not any(n.meta["requires_grad"] for n in inside)
    detached = [n for n in program.graph.nodes if "detach" in str(n.target)]
    assert detached and all(n.args[0].meta["requires_grad"] for n in detached)


class Regions(nn.Module):
    """A region with gradient inside one without, and one that hands its operand on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        with torch.no_grad():
            same = hidden
            scale = hidden.tanh()
            with torch.enable_grad():
                scale = scale * self.weight
        return (same * scale).sum()


def test_regions_in_regions() -> None:
    model, x = Regions(), torch.randn(4, 4)
    program = capture(model, {"x": x})
    values = {**dict(model.named_parameters()), "x": x}
    (loss,) = program.graph_module(*(values[i.target] for i in program.inputs))
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters), torch.autograd.grad(model(x), parameters)
    )
