"""The mixture of experts of a stand-in: a router, and experts that are one op of the graph."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import autopar.experts.op  # noqa: F401 - registers the op
from autopar.experts.activation import text_of


def swiglu(columns: torch.Tensor) -> torch.Tensor:
    """Columns of gate and up, [rows, 2 i] -> [rows, i]."""
    gate, up = columns.chunk(2, -1)
    return F.silu(gate) * up


class Experts(nn.Module):
    """`count` experts, gated or not, of which every token takes `choices`: [b, s, h] -> the same.

    Weights of a token's choices are the softmax over all experts, made to add up to 1.
    """

    def __init__(self, hidden: int, inner: int, count: int, choices: int, gated: bool) -> None:
        super().__init__()
        self.choices = choices
        self.router = nn.Linear(hidden, count, bias=False)
        self.up = nn.Parameter(torch.empty(count, (2 if gated else 1) * inner, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, inner))
        with torch.device("cpu"):  # it is tried out, and meta tensors have no values
            self.text = text_of(swiglu if gated else F.gelu, torch.float32, 2 if gated else 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        scores = F.softmax(self.router(tokens), dim=-1, dtype=torch.float32)
        weights, index = torch.topk(scores, self.choices, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        optional = (None,) * 4  # a gate of its own, and biases
        rest = len(self.up), 0, 1, False, self.text
        made: torch.Tensor = torch.ops.autopar.experts(
            tokens, index, weights, self.up, self.down, *optional, *rest
        )
        return made.view(x.shape)
