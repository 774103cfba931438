"""An optimizer's state under the names of the user's model, so that any layout can load it.

An optimizer counts parameters: parameter 3 of one pipeline stage is another one than parameter 3 of
the next. Names make the states of all stages one checkpoint. The keys are flat, as
`torch.distributed.checkpoint.state_dict` writes them with `flatten_optimizer_state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError


def optimizer_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """`state.NAME.KEY` (tensors sharded as the parameter) and `param_groups.NAME.OPTION`.

    Of an optimizer that has not stepped, the state is made first (of zeros), so that a checkpoint
    can be read into it. Parameters of the optimizer that have no name are left out.
    """
    if not any(optimizer.state.values()):
        _make_state(optimizer)
    found: dict[str, Any] = {}
    for name, parameter, group in _named(optimizer, parameters):
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"state.{name}.{key}"] = value
        for key, value in group.items():
            if key != "params":
                found[f"param_groups.{name}.{key}"] = value
    return found


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    state: Mapping[str, Any],
) -> None:
    """The reverse of `optimizer_state`. Raises `UsageError` when a parameter has no entry."""
    for name, parameter, group in _named(optimizer, parameters):
        own = _under(state, f"state.{name}.")
        options = _under(state, f"param_groups.{name}.")
        if not options:
            raise UsageError(
                f"the optimizer state has nothing for parameter {name!r}",
                next_step="load what optimizer_state_dict of a program of the same model gave",
            )
        if own:
            optimizer.state[parameter] = own
        else:
            optimizer.state.pop(parameter, None)
        group.update(options)


def _named(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, nn.Parameter, dict[str, Any]]]:
    names = {parameter: name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter in names:
                yield names[parameter], parameter, group


def _under(state: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {key[len(prefix) :]: value for key, value in state.items() if key.startswith(prefix)}


def _make_state(optimizer: torch.optim.Optimizer) -> None:
    """A step with zero gradients and rate 0 has the optimizer make its tensors; then all are 0."""
    rates = [group["lr"] for group in optimizer.param_groups]
    gradients = {p: p.grad for group in optimizer.param_groups for p in group["params"]}
    for parameter in gradients:
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    for group in optimizer.param_groups:
        rate = group["lr"]
        group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, gradient in gradients.items():
        parameter.grad = gradient
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, torch.Tensor):
                value.zero_()
