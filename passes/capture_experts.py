"""The experts of a layer as one op, `autopar::experts`, while a model is traced.

MixtralExperts.forward(hidden, index, weights)   ->   autopar.experts(hidden, index, weights,
                                                        gate_up_proj, down_proj, ...)

Classes with transformers' experts interface get it as one more implementation; classes that were
declared (`autopar.declare_experts`) by their forward, and layers that send all tokens to all
experts by theirs. Only the twin that is traced is changed.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

import autopar.experts.op  # noqa: F401 - registers the op
from autopar.errors import CaptureError
from autopar.experts.activation import NoText
from autopar.experts.capacity import capacity_factor
from autopar.experts.declaration import Activation, Layout, declared
from autopar.experts.interface import expert_layout, of_interface, routed_layer

Tensor = torch.Tensor
_NAME = "autopar"
_KEPT = "_autopar_experts"


@contextmanager
def experts_as_one_op(twin: nn.Module) -> Iterator[tuple[str, ...]]:
    """Active while the twin is traced; yields notes on experts that stay many ops, and on layers
    that compute less than their own forward does.

    Raises `CaptureError` for a declaration that does not fit its module.
    """
    notes: dict[str, None] = {}
    texts: dict[Any, str] = {}
    inherited = []
    for path, module in twin.named_modules():
        own, found = declared(module), expert_layout(module)
        if found is None:
            continue
        try:
            kept = found[0], _text(module, *found, texts)
        except NoText as error:
            if own is not None:
                raise CaptureError(
                    f"{path or type(module).__name__}: {error}", next_step=error.next_step
                ) from error
            notes[f"the experts of {path} are many ops of the graph: {error}"] = None
            continue
        object.__setattr__(module, _KEPT, kept)
        if own is None and of_interface(module) is not None:
            inherited.append(module)
        else:
            module.forward = _declared_forward(module)
    for kind in _send_choices_alone(twin):
        notes[f"{kind} sends tokens to chosen experts alone: FLOPs are those of the choices"] = None
    with _registered(inherited):
        yield tuple(notes)


def _send_choices_alone(twin: nn.Module) -> Iterator[str]:
    """Of layers that send all tokens to all experts; the names of their classes."""
    for module in twin.modules():
        routed = routed_layer(module)
        if routed is not None and any(hasattr(m, _KEPT) for m in module.modules()):
            module.forward = partial(routed, module)
            yield type(module).__name__


def _text(module: nn.Module, layout: Layout, function: Activation, known: dict[Any, str]) -> str:
    """The text of the function between the projections; modules that hold the same share it."""
    up = layout.tensors(module)[0]
    assert up is not None
    parts = [(type(m), *_state(m)) for m in module.modules()]
    key = (function, up.dtype, tuple(parts))
    if key not in known:
        known[key] = layout.activation_text(module, function)
    return known[key]


def _state(module: nn.Module) -> Iterator[Any]:
    """What a module holds beside tensors and parts: plain values, and which objects."""
    empty = vars(nn.Module())
    for name, value in module.__dict__.items():
        if name not in empty or name == "training":
            plain = isinstance(value, bool | int | float | str | None)
            yield name, (type(value), repr(value)) if plain else id(value)


def _call(module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    layout, text = getattr(module, _KEPT)
    tensors = layout.tensors(module)
    if hidden.dim() != 2 or index.dim() != 2 or index.shape != weights.shape:
        raise CaptureError(
            f"{type(module).__name__} gets hidden {tuple(hidden.shape)}, index "
            f"{tuple(index.shape)} and weights {tuple(weights.shape)}",
            next_step="give its forward [tokens, h] and twice [tokens, choices]",
        )
    up = tensors[0]
    assert up is not None
    experts, width = up.shape[0], up.shape[1 if layout.transposed else 2]
    if hidden.shape[1] != width:
        raise CaptureError(
            f"{type(module).__name__} gets tokens of {hidden.shape[1]} numbers, its weights are "
            f"for {width}",
            next_step="say how the weights lie (transposed) in declare_experts",
        )
    count, factor = experts, capacity_factor(module)
    if factor is not None:
        index = torch.ops.autopar.within_capacity(index, weights, experts, factor)
        count += 1  # dropped rows are those of an expert that is on no rank
    choices = index.shape[1]
    if layout.weighs_inputs:
        hidden, index, weights = _weighed(hidden, index, weights)
    result: Tensor = torch.ops.autopar.experts(
        hidden, index, weights, *tensors, count, 0, 1, layout.transposed, text
    )
    if layout.weighs_inputs and choices > 1:
        result = result.view(-1, choices, result.shape[1]).sum(1)
    return result


def _weighed(hidden: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Every choice as a token of its own, times its weight, with one choice of weight 1.

    What lies between the projections is not linear, so the weight can't wait for the result.
    """
    if index.shape[1] == 1:
        return (hidden * weights).to(hidden.dtype), index, torch.ones_like(weights)
    rows = (hidden.unsqueeze(1) * weights.unsqueeze(2)).to(hidden.dtype).flatten(0, 1)
    return rows, index.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1)


def _declared_forward(module: nn.Module) -> Callable[..., Tensor]:
    signature = inspect.signature(module.forward)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = list(signature.bind(*args, **kwargs).arguments.values() if kwargs else args)
        if len(given) != 3 or not all(isinstance(v, Tensor) for v in given):
            raise CaptureError(
                f"{type(module).__name__}.forward is called with {len(given)} arguments",
                next_step="declare a class whose forward takes hidden, index and weights, or its "
                "layer too (layer=, routed=)",
            )
        return _call(module, *given)

    return forward


def _implementation(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """As transformers calls one of its implementations."""
    if hasattr(module, _KEPT):
        return _call(module, hidden_states, top_k_index, top_k_weights)
    from transformers.integrations.moe import grouped_mm_experts_forward

    result: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    return result


@contextmanager
def _registered(modules: list[Any]) -> Iterator[None]:
    """transformers' table of implementations with ours, which the twins' configurations name."""
    source = sys.modules.get("transformers.integrations.moe")
    if not modules or source is None:
        yield
        return
    table = source.ALL_EXPERTS_FUNCTIONS
    before = [(m.config, m.config._experts_implementation_internal) for m in modules]
    table[_NAME] = _implementation
    try:
        for module in modules:
            module.config._experts_implementation = _NAME
        yield
    finally:
        for config, value in before:
            config._experts_implementation_internal = value
        del table[_NAME]
