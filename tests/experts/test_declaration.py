"""What may be declared, and what a declaration is found for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import CaptureError, UsageError
from autopar.experts.declaration import Layout, declared, declared_layer, forget_experts


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 12, 8))
        self.down = nn.Parameter(torch.randn(4, 8, 6))
        self.bias = nn.Parameter(torch.randn(4, 12))


class Special(Experts):
    pass


def act(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x[:, ::2] * x[:, 1::2]


def test_a_class_and_what_inherits_from_it() -> None:
    autopar.declare_experts(Experts, up="up", down="down", activation=act, gated=True)
    try:
        for kind in (Experts, Special):
            found = declared(kind())
            assert found is not None and found[0].gated
            assert found[0].activation_text(kind(), found[1]).count("slice") == 2
        assert declared(nn.Linear(2, 2)) is None
    finally:
        forget_experts(Experts)
    assert declared(Experts()) is None


def test_a_layer_goes_with_the_declaration_of_its_experts() -> None:
    rest: dict[str, Any] = {"up": "up", "down": "down", "activation": act}
    autopar.declare_experts(Experts, **rest, layer=nn.Sequential, routed=act)
    try:
        assert declared_layer(nn.Sequential()) is act and declared_layer(nn.ReLU()) is None
        autopar.declare_experts(Experts, **rest)
        assert declared_layer(nn.Sequential()) is None
    finally:
        forget_experts(Experts)


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no class": (Experts(), {"activation": act}, "no class of modules"),
    "no function": (Experts, {"activation": "silu"}, "can't be called"),
    "two gates": (Experts, {"activation": act, "gate": "g", "gated": True}, "gated=True"),
    "a layer alone": (Experts, {"activation": act, "layer": Special}, "routed=None"),
    "no layer": (Experts, {"activation": act, "layer": 3, "routed": act}, "3 is no class"),
    "no forward": (Experts, {"activation": act, "layer": Special, "routed": 3}, "routed=3 can't"),
    "biases of all tokens": (
        Experts,
        {"activation": act, "up_bias": "b", "weighs_inputs": True, "layer": Special, "routed": act},
        "not chosen for, which Special adds up",
    ),
    "half of the biases": (Experts, {"activation": act, "gate": "g", "up_bias": "b"}, "gate_bias"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_makes_no_sense_is_refused(name: str) -> None:
    kind, rest, why = WRONG[name]
    with pytest.raises(UsageError, match=why):
        autopar.declare_experts(kind, up="up", down="down", **rest)


FITS = Layout("up", "down", up_bias="bias", gated=True)


def test_tensors_of_a_module_that_fits() -> None:
    module = Experts()
    assert FITS.tensors(module) == (module.up, module.down, None, module.bias, None, None)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (Layout("up", "gone", gated=True), "no tensor 'gone'"),
        (Layout("up", "down"), r"'up' is \(4, 12, 8\), not \(4, 6, 8\)"),
        (Layout("up", "down", down_bias="bias", gated=True), r"'bias' is \(4, 12\), not \(4, 8\)"),
        (Layout("bias", "down"), "not .experts, out, in."),
    ],
)
def test_tensors_that_do_not_fit(layout: Layout, why: str) -> None:
    with pytest.raises(CaptureError, match=why):
        layout.tensors(Experts())
