"""Where the experts of a module are: as its author declared it, as transformers' experts interface
says it, or as is known of a class of transformers without it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autopar.experts.declaration import Activation, Layout, Routed, declared, declared_layer
from autopar.experts.library_layers import library_experts, library_layer

Tensor = torch.Tensor
# What transformers' decorator writes on a module.
_SAID = ("config", "has_gate", "has_bias", "is_transposed", "is_concatenated", "_apply_gate")


def expert_layout(module: nn.Module) -> tuple[Layout, Activation] | None:
    """Where the experts of a module are, and the function between their projections; None for
    modules that compute none."""
    return declared(module) or of_interface(module) or library_experts(module)


def routed_layer(module: nn.Module) -> Routed | None:
    """The forward with choices alone of a layer that sends all tokens to all experts."""
    return declared_layer(module) or library_layer(module)


def of_interface(module: nn.Module) -> tuple[Layout, Activation] | None:
    """The layout that transformers' decorator wrote on a module of its experts interface."""
    said: Any = module
    if not all(hasattr(module, name) for name in _SAID):
        return None
    if getattr(said, "_is_expert_parallel", False):
        return None  # transformers has split it already
    up = "gate_up_proj" if said.has_gate else "up_proj"
    if getattr(said, "has_post_expert_norm", False) or not hasattr(module, up):
        return None
    layout = Layout(
        up,
        "down_proj",
        up_bias=f"{up}_bias" if said.has_bias else "",
        down_bias="down_proj_bias" if said.has_bias else "",
        transposed=said.is_transposed,
        gated=said.has_gate,
    )
    return layout, _apply_gate if said.has_gate else _act_fn


def _apply_gate(module: Any, x: Tensor) -> Tensor:
    result: Tensor = module._apply_gate(x)
    return result


def _act_fn(module: Any, x: Tensor) -> Tensor:
    result: Tensor = module.act_fn(x)
    return result
