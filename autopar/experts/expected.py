"""The load that prices assume: measured rows of every expert instead of uniform routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from autopar.errors import UsageError
from autopar.experts.interface import expert_layout
from autopar.experts.load import checked_load

_KEPT = "_autopar_expected_load"
Shares = tuple[float, ...]


def expect_load(model: nn.Module, load: Mapping[str, Sequence[float]]) -> nn.Module:
    """Have plans of a model priced for a load, as `expert_load()` of a program gives it; returns
    the model.

    `load`: rows of each expert by layer (the module of its experts); layers that it lacks are taken
    to be even. Ranks wait for the one whose experts have the most rows, and it must hold them.
    Raises `UsageError` for a layer that the model has not, one of another number of experts, or one
    without rows.
    """
    modules = {n: m for n, m in model.named_modules() if expert_layout(m) is not None}
    read = checked_load(load)
    for name, rows in read.items():
        if name not in modules:
            raise UsageError(
                f"the load has layer {name!r}, the model has not",
                next_step=f"its layers with experts are {', '.join(list(modules)[:4]) or 'none'}",
            )
        layout = expert_layout(modules[name])
        assert layout is not None
        up = layout[0].tensors(modules[name])[0]
        assert up is not None
        checked_load({name: rows}, up.shape[0])
        if not sum(rows):
            raise UsageError(
                f"the load of layer {name!r} has no rows", next_step="leave the layer out"
            )
    for name, module in modules.items():
        rows = read.get(name, ())
        object.__setattr__(module, _KEPT, tuple(r / sum(rows) for r in rows))
    return model


def expected_load(model: nn.Module) -> dict[str, Shares]:
    """Shares of all rows by layer, of the layers that `expect_load` named."""
    kept = {name: getattr(module, _KEPT, ()) for name, module in model.named_modules()}
    return {name: shares for name, shares in kept.items() if shares}


def busiest_shares(layers: Sequence[Shares], ranks: int) -> list[float]:
    """Of each layer the share of rows of the busiest of `ranks` ranks, that hold as many experts
    each, neighbours together."""
    found = []
    for shares in layers:
        here = len(shares) // ranks
        found.append(max(sum(shares[r * here : (r + 1) * here]) for r in range(ranks)))
    return found
