"""Models that the user's own Python file makes: `file.py:function`."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError
from autopar.inputs import flatten_inputs
from autopar.loss_function import LossFunction

Made = tuple[nn.Module, dict[str, Any] | None, LossFunction | None]


def model_from_function(text: str) -> Made:
    """Call the function that `text` (`file.py:function`) names, without arguments.

    It returns `(model, example_inputs)`, `(model, example_inputs, loss_fn)` or a model (inputs None
    then). Example inputs go by the names of forward's arguments, or by position in a tuple; they
    may be nested. Raises `UsageError` when the
    file or function is missing, the call fails, or the result is something else.
    """
    file, _, name = text.rpartition(":")
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise UsageError(f"{text}: no file {path}", next_step="check the path")
    module = _load(path, text)
    function = getattr(module, name, None)
    if not callable(function):
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        near = difflib.get_close_matches(name, names, n=1) or names[:5]
        raise UsageError(
            f"{path.name} has no function {name!r}",
            next_step=f"did you mean {', '.join(near)}?" if near else "define it in the file",
        )
    try:
        result = function()
    # The user's code may fail in any way; the chained error shows where.
    except Exception as error:
        raise UsageError(
            f"{text} failed: {type(error).__name__}: {error}",
            next_step="the function is called without arguments; make that work in Python first",
        ) from error
    if isinstance(result, nn.Module):
        return result, None, None
    if isinstance(result, tuple) and len(result) in (2, 3) and isinstance(result[0], nn.Module):
        loss_fn = result[2] if len(result) == 3 else None
        if loss_fn is not None and not callable(loss_fn):
            raise UsageError(
                f"{text}: the loss function is a {type(loss_fn).__name__}",
                next_step="return (model, example_inputs, loss_fn): loss_fn(outputs, **inputs)",
            )
        return result[0], _named_inputs(text, result[0], result[1]), loss_fn
    raise UsageError(
        f"{text} returned {type(result).__name__}",
        next_step="return (model, example_inputs), with the inputs as a dict of tensors",
    )


def _load(path: Path, text: str) -> ModuleType:
    """Import the file as a module of its own; its folder joins the import path, as for a script."""
    name = f"autopar_model_{path.stem}_{hashlib.sha1(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{text}: {path} is not a Python file", next_step="give a .py file")
    module = importlib.util.module_from_spec(spec)
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    # Dataclasses and pickling look a module up by name while and after it runs.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UsageError(
            f"{path} can't be imported: {type(error).__name__}: {error}",
            next_step=f"make `python {path.name}` work first",
        ) from error
    return module


def _named_inputs(text: str, model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Example inputs by the names of forward's arguments."""
    if isinstance(inputs, torch.Tensor):
        inputs = (inputs,)
    if isinstance(inputs, list | tuple):
        try:
            inputs = inspect.signature(model.forward).bind(*inputs).arguments
        except TypeError as error:
            raise UsageError(
                f"{text}: {len(inputs)} example inputs don't fit {type(model).__name__}.forward: "
                f"{error}",
                next_step="return the inputs as a dict by argument name",
            ) from error
    good = isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs)
    if not good or not flatten_inputs(inputs)[0]:
        raise UsageError(
            f"{text}: the example inputs are not tensors by argument name",
            next_step="return (model, {'argument': tensor, ...})",
        )
    return dict(inputs)
