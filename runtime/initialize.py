"""Values for a model on the meta device: the same on every rank, whatever the plan.

One module at a time gets real (CPU) tensors and is initialised by the model's own code:
`_init_weights` of the nearest module around it that has one (Hugging Face models), called for it
and then for the modules around it, as a walk over the whole model would; else its
`reset_parameters`. The random seed depends on the module's path only, so a rank that skips
modules draws the same numbers.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode

from autopar.errors import UsageError


def module_values(model: nn.Module, path: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Parameters and buffers that the module at `path` owns itself, by their names in it.

    Tensors that are real already are returned as they are; those on meta are initialised, in
    float32 at least. Raises `UsageError` that names a tensor which nothing initialises.
    """
    owner = model.get_submodule(path)
    before = {**owner._parameters, **owner._buffers}
    values = {name: tensor for name, tensor in before.items() if tensor is not None}
    on_meta = {name: tensor for name, tensor in values.items() if tensor.is_meta}
    if not on_meta:
        return {name: tensor.detach() for name, tensor in values.items()}
    if active_fake_mode() is not None:  # a dry run has shapes, no values
        made = {name: torch.empty_like(tensor, device="cpu") for name, tensor in on_meta.items()}
        return {name: made.get(name, tensor).detach() for name, tensor in values.items()}
    fresh = {name: _unset(tensor) for name, tensor in on_meta.items()}
    digest = hashlib.sha256(f"{seed} {path}".encode()).digest()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        try:
            _place(owner, fresh)
            _run_initializers(model, path)
            # An initialiser may set a new tensor in the place of ours.
            found = {name: _current(owner, name) for name in fresh}
        finally:
            _place(owner, on_meta)
    for name, tensor in found.items():
        if tensor.is_meta or not _is_set(tensor):
            full = f"{path}.{name}" if path else name
            raise UsageError(
                f"{full!r} is on the meta device and no code of {type(owner).__name__} sets it",
                next_step="give the module a reset_parameters() that sets it, or build the model "
                "on a real device",
            )
    return {name: found.get(name, tensor).detach() for name, tensor in values.items()}


def materialize_model(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy of `model` on the CPU, with the values that a distributed program would start from."""
    result = copy.deepcopy(model)
    made: dict[int, torch.Tensor] = {}
    for path, module in result.named_modules():
        own = {**module._parameters, **module._buffers}
        if not any(t is not None and t.is_meta for t in own.values()):
            continue
        values = module_values(model, path, seed)
        real: dict[str, torch.Tensor] = {}
        for name, tensor in own.items():
            if tensor is None:
                continue
            # Tied tensors stay one tensor; the first owner in the model's order sets the values.
            if id(tensor) not in made:
                value = values[name].to(tensor.dtype).clone()
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = (
                    nn.Parameter(value, tensor.requires_grad) if is_parameter else value
                )
            real[name] = made[id(tensor)]
        _place(module, real)
    return result


def _unset(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor filled with a value that no initialiser gives."""
    dtype = tensor.dtype
    if dtype.is_floating_point:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        value = torch.full(tensor.shape, float("nan"), dtype=wide)
    elif dtype == torch.bool or dtype.is_complex:
        value = torch.empty(tensor.shape, dtype=dtype, device="meta")
    else:
        value = torch.full(tensor.shape, torch.iinfo(dtype).min, dtype=dtype)
    return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def _is_set(tensor: torch.Tensor) -> bool:
    if tensor.dtype.is_floating_point:
        return not bool(torch.isnan(tensor).any())
    if tensor.dtype == torch.bool or tensor.dtype.is_complex:
        return True
    return not bool((tensor == torch.iinfo(tensor.dtype).min).any())


def _place(owner: nn.Module, tensors: dict[str, Any]) -> None:
    """Put tensors under their names, past `__setattr__`, which would refuse or re-register."""
    for name, tensor in tensors.items():
        if name in owner._parameters:
            owner._parameters[name] = tensor
        else:
            owner._buffers[name] = tensor


def _current(owner: nn.Module, name: str) -> torch.Tensor:
    tensor: torch.Tensor | None = owner._parameters.get(name)
    if tensor is None:
        tensor = owner._buffers[name]
    assert tensor is not None
    return tensor


def _run_initializers(model: nn.Module, path: str) -> None:
    parts = path.split(".") if path else []
    chain = [model]
    for part in parts:
        chain.append(chain[-1].get_submodule(part))
    found = False
    for index in range(len(chain) - 1, -1, -1):
        initializer = _init_weights(chain[: index + 1])
        if initializer is not None:
            initializer(chain[index])
            found = True
    if found:
        return
    for name in ("reset_parameters", "_reset_parameters"):
        reset = getattr(chain[-1], name, None)
        if callable(reset):
            reset()
            return


def _init_weights(chain: list[nn.Module]) -> Callable[[nn.Module], Any] | None:
    """`_init_weights` of the innermost module of `chain` that has it."""
    for module in reversed(chain):
        function = getattr(module, "_init_weights", None)
        if callable(function):
            result: Callable[[nn.Module], Any] = function
            return result
    return None
