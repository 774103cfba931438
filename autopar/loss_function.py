"""From inputs to the scalar that is trained: the model's own loss, or that of a `loss_fn`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopar.errors import CaptureError, UsageError

LossFunction = Callable[..., torch.Tensor]


def loss_of(
    model: Callable[..., Any], inputs: Mapping[str, Any], loss_fn: LossFunction | None = None
) -> torch.Tensor:
    """Run a model (a module, or its forward) on inputs by name and return its loss, a scalar.

    Without `loss_fn` it is the output called `loss`, or the first floating scalar. With it, inputs
    that `loss_fn` names after its first parameter go to it, the others to the model; what both name
    goes to both. Raises `CaptureError` when there is no scalar, or no telling which.
    """
    if loss_fn is None:
        return _own_loss(_call(model, inputs))
    wanted = _loss_inputs(loss_fn, inputs)
    known = named_parameters(model)
    given = {k: v for k, v in inputs.items() if k not in wanted or k in known}
    loss = loss_fn(_call(model, given), **{k: inputs[k] for k in wanted})
    if not is_loss(loss):
        raise CaptureError(
            f"loss_fn returned {_describe(loss)}", next_step="return a floating-point scalar"
        )
    return loss


def _signature(model: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(model.forward if isinstance(model, nn.Module) else model)


def _call(model: Callable[..., Any], inputs: Mapping[str, Any]) -> Any:
    """By keyword, but positional-only parameters and those of `*args` by position."""
    parameters = _signature(model).parameters.values()
    first = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_ONLY]
    rest = next((p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL), None)
    positional: list[Any] = [inputs[n] for n in first if n in inputs]
    taken = set(first)
    if rest is not None and isinstance(inputs.get(rest), list | tuple):
        before = [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        positional += [inputs[n] for n in before if n in inputs]
        positional += list(inputs[rest])
        taken |= {*before, rest}
    return model(*positional, **{k: v for k, v in inputs.items() if k not in taken})


def named_parameters(model: Callable[..., Any]) -> set[str]:
    """The names a call can give by keyword, those behind `**` not among them."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in _signature(model).parameters.values() if p.kind in kinds}


def _loss_inputs(loss_fn: LossFunction, inputs: Mapping[str, Any]) -> list[str]:
    parameters = list(inspect.signature(loss_fn).parameters.values())[1:]
    missing = [
        p.name
        for p in parameters
        if p.name not in inputs
        and p.default is inspect.Parameter.empty
        and p.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    if missing:
        raise UsageError(
            f"loss_fn needs {missing[0]!r}, which is not among the inputs {sorted(inputs)}",
            next_step=f"add {missing[0]!r} to example_inputs and to every batch",
        )
    return [p.name for p in parameters if p.name in inputs]


def is_loss(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _own_loss(outputs: Any) -> torch.Tensor:
    """Of a tensor, a tuple (the first scalar), a mapping or a dataclass (`loss`)."""
    if is_loss(outputs):
        found: torch.Tensor = outputs
        return found
    named = _named(outputs)
    if named is not None:
        if is_loss(named.get("loss")):
            own: torch.Tensor = named["loss"]
            return own
        scalars = [k for k, v in named.items() if is_loss(v)]
        if len(scalars) > 1:
            raise CaptureError(
                f"the model returns several scalars, {', '.join(map(str, scalars))}, and none is "
                "called loss",
                next_step="say how they combine with loss_fn=, e.g. "
                f"lambda out: out[{scalars[0]!r}] + out[{scalars[1]!r}]",
            )
        if scalars:
            only: torch.Tensor = named[scalars[0]]
            return only
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            if is_loss(value):
                first: torch.Tensor = value
                return first
    raise CaptureError(
        f"no output of the model is a scalar loss: it returns {_describe(outputs)}",
        next_step="pass labels in example_inputs, give loss_fn=, "
        "or wrap the model in one that returns the loss",
    )


def _named(outputs: Any) -> dict[str, Any] | None:
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if dataclasses.is_dataclass(outputs) and not isinstance(outputs, type):
        return {f.name: getattr(outputs, f.name, None) for f in dataclasses.fields(outputs)}
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return dict(zip(outputs._fields, outputs, strict=True))
    return None


def _describe(outputs: Any) -> str:
    if isinstance(outputs, torch.Tensor):
        return f"a {outputs.dtype} tensor of shape {list(outputs.shape)}"
    named = _named(outputs)
    if named is not None:
        held = ", ".join(str(k) for k, v in named.items() if v is not None)
        return f"{type(outputs).__name__}({held})"
    if isinstance(outputs, list | tuple):
        return f"{type(outputs).__name__} of {', '.join(_describe(v) for v in outputs[:4])}"
    return f"a {type(outputs).__name__}"
