"""The model as torch.export sees it: on the meta device, a function from tensors to the loss."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from autopar.errors import CaptureError
from autopar.inputs import Inputs, replace_tensors
from autopar.loss_function import LossFunction, loss_of
from autopar.passes.capture_functions import refuse_hidden_functions


def named_inputs(model: nn.Module, example_inputs: Inputs) -> dict[str, Any]:
    """What the user gave, by the names of forward's parameters."""
    if isinstance(example_inputs, Mapping):
        return dict(example_inputs)
    if isinstance(example_inputs, torch.Tensor):
        example_inputs = (example_inputs,)
    if not isinstance(example_inputs, Sequence) or isinstance(example_inputs, str):
        raise CaptureError(
            f"example_inputs is a {type(example_inputs).__name__}",
            next_step="give a dict of keyword tensors or a tuple of positional ones",
        )
    try:
        return dict(inspect.signature(model.forward).bind(*example_inputs).arguments)
    except TypeError as error:
        raise CaptureError(
            f"{len(example_inputs)} example inputs don't fit {type(model).__name__}.forward: "
            f"{error}",
            next_step="give the inputs as a dict by parameter name",
        ) from error


def meta_twin(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of the model whose tensors all live on the meta device; ties are kept."""
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise CaptureError(
                f"parameter {name!r} of {type(model).__name__} has no shape yet",
                next_step="call the model once on a small batch: that makes its lazy modules",
            )
        kind = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
        twin = torch.empty_like(parameter, device="meta", dtype=kind)
        memo[id(parameter)] = nn.Parameter(twin, requires_grad=parameter.requires_grad)
    for module in model.modules():
        tensors = [*module._buffers.values()]
        tensors += [v for v in vars(module).values() if isinstance(v, torch.Tensor)]
        for tensor in tensors:
            if tensor is not None and id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().to("meta")
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise CaptureError(
            f"{type(model).__name__} can't be copied: {error}",
            next_step="remove what copy.deepcopy refuses (locks, files, hooks) from the module",
        ) from error


def without_caches(twin: nn.Module) -> None:
    """Generation's cache is no part of a training step, and torch.export can't return it."""
    for module in twin.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):
            config.use_cache = False


def returns_loss(
    twin: nn.Module, inputs: Mapping[str, Any], loss_fn: LossFunction | None
) -> list[torch.Tensor]:
    """Make the twin a function of a flat list of tensors that returns the loss alone.

    Returns those tensors, on meta, in the order of their names. Parameters and module paths stay as
    they are: it is the twin's own `forward` that is exchanged.
    """
    leaves: list[torch.Tensor] = []

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        # A new one for each place: torch.export tells inputs apart by identity.
        leaves.append(torch.empty_like(tensor, device="meta").requires_grad_(False))
        return leaves[-1]

    nest = replace_tensors(dict(inputs), on_meta)
    forward = twin.forward

    def loss(*tensors: torch.Tensor) -> torch.Tensor:
        given = iter(tensors)
        result = loss_of(forward, replace_tensors(nest, lambda _: next(given)), loss_fn)
        refuse_hidden_functions(result)
        return result

    twin.forward = loss
    return leaves
