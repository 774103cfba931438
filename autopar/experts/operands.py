"""The arguments of the ops that compute a layer's experts, and how a rank's form follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from autopar.experts import EXPERTS

Tensor = torch.Tensor
# Every form of the op begins with these; `experts` is how many there are on all ranks.
SCHEMA = (
    "(Tensor hidden, Tensor index, Tensor weights, Tensor up, Tensor down, Tensor? gate, "
    "Tensor? up_bias, Tensor? gate_bias, Tensor? down_bias, int experts, "
)
OWN_SCHEMA = f"{SCHEMA}bool transposed, str activation, int ranks, str group) -> Tensor"
TENSORS = 9
UP = 3
_SPREAD = 11


def is_expert_call(node: fx.Node) -> bool:
    """Whether a node computes the experts of a layer, in any form of the op."""
    target: Any = node.target
    return (
        node.op == "call_function"
        and getattr(target, "namespace", "") == "autopar"
        and target._opname in EXPERTS
    )


class Operands(NamedTuple):
    """The tensors of a call, in its order; `chosen` is its `index`."""

    hidden: Tensor
    chosen: Tensor
    weights: Tensor
    up: Tensor
    down: Tensor
    gate: Tensor | None
    up_bias: Tensor | None
    gate_bias: Tensor | None
    down_bias: Tensor | None


def own_arguments(arguments: Sequence[Any], ranks: int, group: str) -> tuple[Any, ...]:
    """Of `own_experts` or `exchanged_experts`, from those of `experts`."""
    *shared, _, _, transposed, activation = arguments
    return (*shared, transposed, activation, ranks, group)


def spread_arguments(arguments: Sequence[Any], ranks: int) -> tuple[Any, ...]:
    """Of `experts` for a rank that gets rows from the tokens of `ranks` ranks (shapes alone)."""
    return (*arguments[:_SPREAD], ranks, *arguments[_SPREAD + 1 :])
