"""Optimizers of this process that hold states of a parameter, whoever made them.

torch has no way from a parameter to its optimizers: an optimizer knows its parameters only. So the
objects that Python's garbage collector tracks are looked through, which takes a part of a second.
It leaves no hook in torch, and finds states that were loaded, or made by a compiled or fused step.
"""

from __future__ import annotations

import gc
from collections.abc import Collection

import torch
from torch import nn

Optimizer = torch.optim.Optimizer


def live_optimizers(
    parameters: Collection[nn.Parameter], known: Optimizer | None = None
) -> list[Optimizer]:
    """Those with a state for each element, or a mean of some, of one of `parameters`; without
    `known`."""
    found = _holding(parameters, known)
    if not found:
        return found
    # Schedulers and their optimizers hold each other, and wait for the collector once dropped.
    found.clear()
    gc.collect()
    return _holding(parameters, known)


def _holding(parameters: Collection[nn.Parameter], known: Optimizer | None) -> list[Optimizer]:
    # By type: other objects may answer isinstance by doing something.
    every = [x for x in gc.get_objects() if issubclass(type(x), Optimizer) and x is not known]
    return [x for x in every if any(holds(x, p) for p in parameters)]


def holds(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    """Whether there is more than a count of steps."""
    # An optimizer that is being made has no state yet.
    states = getattr(optimizer, "state", {}).get(parameter, {})
    return any(isinstance(v, torch.Tensor) and v.dim() > 0 for v in states.values())
