"""Hooks on gradients would be lost: each is refused by its name, its place and a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import CaptureError
from autopar.passes.capture import capture

X = torch.ones(4, 4)


class Step(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.inner(x))


class Model(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.steps = nn.ModuleList([Step(torch.relu), Step(function)])

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x.sum()


def tripled(*args: Any) -> Any:
    return None


@pytest.mark.parametrize(
    ("register", "place"),
    [
        (lambda m: m.steps[1].register_full_backward_hook(tripled), "module 'steps.1'"),
        (lambda m: m.steps[1].register_full_backward_pre_hook(tripled), "module 'steps.1'"),
        (lambda m: m.steps[1].register_backward_hook(tripled), "module 'steps.1'"),
        (lambda m: m.steps[1].inner.weight.register_hook(tripled), "'steps.1.inner.weight'"),
        (
            lambda m: m.steps[0].inner.bias.register_post_accumulate_grad_hook(tripled),
            "'steps.0.inner.bias'",
        ),
    ],
)
def test_a_hook_of_the_model(register: Callable[[Any], Any], place: str) -> None:
    model = Model()
    register(model)
    with pytest.raises(CaptureError) as info:
        capture(model, {"x": X})
    assert place in info.value.message and "tripled" in info.value.message
    assert "remove the hook" in info.value.next_step


def test_a_hook_for_all_modules() -> None:
    handle = nn.modules.module.register_module_full_backward_hook(tripled)
    try:
        with pytest.raises(CaptureError, match="all modules"):
            capture(Model(), {"x": X})
    finally:
        handle.remove()


def in_forward(z: Tensor) -> Tensor:
    z.register_hook(tripled)
    return z


def packed(z: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.half(), lambda t: t.float()):
        return torch.tanh(z)


def for_several(z: Tensor) -> Tensor:
    torch.autograd.graph.register_multi_grad_hook([z], tripled)
    return z


@pytest.mark.parametrize("function", [in_forward, packed, for_several])
def test_a_hook_in_the_forward_by_its_line(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(CaptureError) as info:
        capture(Model(function), {"x": X})
    line = function.__code__.co_firstlineno + 1
    assert "module 'steps.1'" in info.value.message
    assert f"{__file__}:{line}" in info.value.message
    assert "remove the hook" in info.value.next_step


def test_a_hook_that_the_forward_puts_on_a_module() -> None:
    model = Model()

    class Registers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.register_full_backward_hook(tripled)
            return x * 2

    model.steps.append(Registers())
    with pytest.raises(CaptureError, match=r"steps\.2"):
        capture(model, {"x": X})


def test_hooks_that_keep_values_are_none() -> None:
    """Those on the forward are part of the graph, and saving on the CPU changes no value."""

    def saved(z: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return torch.tanh(z)

    model = Model(saved)
    model.steps[0].register_forward_hook(lambda m, args, out: out * 3)
    program = capture(model, {"x": X})
    names = [str(n.target) for n in program.graph.nodes]
    assert "aten.tanh.default" in names and "aten.mul.Tensor" in names
