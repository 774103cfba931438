"""A limit on the rows of every expert: what is above it is dropped.

    index[t, k], weights[t, k]  ->  index, where a dropped choice is the number of experts

Of the tokens that are routed together (those of one rank and micro-batch), an expert takes at most

    ceil(factor * t * k / experts)

rows: those with the largest weights, of equal ones the first. A dropped choice adds nothing to its
token. That bounds the rows on a rank whatever the router does, as capacity factors do elsewhere
(Lepikhin et al., GShard, arXiv 2006.16668, section 2.2; Fedus et al., Switch Transformers, arXiv
2101.03961, section 2.2), and changes the model: which rows are dropped depends on which tokens a
rank has.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil, isfinite
from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError
from autopar.experts.interface import expert_layout

Tensor = torch.Tensor
OP = "within_capacity"
_KEPT = "_autopar_capacity_factor"


def limit_experts(model: nn.Module, factor: float) -> nn.Module:
    """Limit the rows of every expert of a model to `factor` times the mean; returns the model.

    Programs that autopar makes of the model drop rows above it, and count them (`routing()`); the
    model's own forward stays as it is. Every process that plans or runs needs the call. Raises
    `UsageError` for a factor that is not positive and finite, and a model without experts that are
    one op.
    """
    if isinstance(factor, bool) or not isinstance(factor, int | float):
        raise UsageError(f"a capacity factor of {factor!r}", next_step="give a number, as 1.25")
    if not isfinite(factor) or factor <= 0:
        raise UsageError(
            f"a capacity factor of {factor}", next_step="give a positive number, as 1.25"
        )
    found = list(_expert_modules(model))
    if not found:
        raise UsageError(
            f"{type(model).__name__} has no experts whose rows could be limited",
            next_step="declare the class that computes them (autopar.declare_experts)",
        )
    for module in found:
        object.__setattr__(module, _KEPT, float(factor))
    return model


def capacity_factor(module: nn.Module) -> float | None:
    """What `limit_experts` said of a module of experts; None: no limit."""
    found: float | None = getattr(module, _KEPT, None)
    return found


def _expert_modules(model: nn.Module) -> Iterator[nn.Module]:
    return (module for module in model.modules() if expert_layout(module) is not None)


def capacity(factor: float, tokens: int, choices: int, experts: int) -> int:
    """Rows that an expert takes at most."""
    return ceil(factor * tokens * choices / experts)


def _within_capacity(index: Tensor, weights: Tensor, experts: int, factor: float) -> Tensor:
    tokens, choices = index.shape
    most = capacity(factor, tokens, choices, experts)
    flat = index.reshape(-1)
    # By expert, and in an expert by weight, the largest first.
    by_weight = torch.sort(weights.detach().reshape(-1), descending=True, stable=True).indices
    expert, order = torch.sort(flat[by_weight], stable=True)
    order = by_weight[order]
    first = torch.searchsorted(expert, torch.arange(experts, device=flat.device, dtype=flat.dtype))
    place = torch.arange(flat.shape[0], device=flat.device) - first[expert.clamp(0, experts - 1)]
    kept = flat.clone()
    kept[order] = torch.where(place < most, expert, experts)
    return kept.view_as(index)


# Any: methods of `Library` are not annotated. A fragment: the namespace has other ops elsewhere.
_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    f"{OP}(Tensor index, Tensor weights, int experts, float factor) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_LIBRARY.impl(OP, _within_capacity, "CompositeExplicitAutograd")
torch.library.register_fake(
    f"autopar::{OP}", lambda index, *rest: torch.empty_like(index), lib=_LIBRARY
)
