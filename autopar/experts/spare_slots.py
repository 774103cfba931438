"""Spare slots: room on every rank for more experts than its even part of a layer's.

They are empty until experts are assigned with copies, or unequally many to ranks.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import fx

from autopar.errors import UsageError
from autopar.experts.operands import TENSORS, UP, is_expert_call
from autopar.plan_document import OF_ELEMENTS


def check_spare(spare: int, optimizer: str) -> None:
    """Raises `UsageError` for a number of slots that is none, and an optimizer whose states don't
    go with elements."""
    if isinstance(spare, bool) or not isinstance(spare, int) or spare < 0:
        raise UsageError(
            f"spare_experts={spare!r}", next_step="give a number of slots for each rank, or 0"
        )
    if spare and optimizer not in OF_ELEMENTS:
        raise UsageError(
            f"spare_experts={spare} with {optimizer}: its states are not of single elements, so "
            "they can't be moved or copied with an expert",
            next_step=f"use one of {', '.join(OF_ELEMENTS)}, or spare_experts=0",
        )


def spare_holders(graph: fx.GraphModule, shared: Container[fx.Node] = ()) -> list[fx.Node]:
    """The placeholders of a rank's block graph that get spare slots: of layers whose experts are
    split, where nothing else (in the graph, or of `shared`, elsewhere) reads what holds them."""
    found: list[fx.Node] = []
    for node in graph.graph.nodes:
        target: Any = node.target
        if not is_expert_call(node) or target._opname == "experts":
            continue
        held = [a for a in node.args[UP:TENSORS] if isinstance(a, fx.Node)]
        if all(a.op == "placeholder" and len(a.users) == 1 and a not in shared for a in held):
            found += held
    return found
