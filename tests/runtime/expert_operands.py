"""Operands of a layer of experts, whole, and what one device makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import autopar.experts.op  # noqa: F401 - registers the op

Tensor = torch.Tensor
TOKENS, HIDDEN, INNER, EXPERTS, CHOICES = 12, 6, 5, 8, 2
TEXT = "v0 = split.Tensor(x, w // 2, -1); v1 = silu.default(v0[0]); v2 = mul.Tensor(v1, v0[1]); v2"


def mine(value: Tensor | None) -> Tensor | None:
    """This rank's rows, as a leaf."""
    if value is None:
        return None
    piece = value.detach().chunk(dist.get_world_size())[dist.get_rank()].clone()
    return piece.requires_grad_(value.requires_grad)


@dataclass(frozen=True)
class Whole:
    """`tokens`: hidden, index, weights; `parameters`: up, down, gate, and their biases; `rest`:
    arguments that a rank's forms take after them."""

    tokens: list[Tensor]
    parameters: list[Tensor]
    seed: Tensor
    rest: tuple[Any, ...] = (EXPERTS, False, TEXT)

    @classmethod
    def make(cls, kind: str) -> Whole:
        """`skewed`: all tokens choose the same experts, so that other ranks get none; `dropped`:
        some choose none."""
        torch.manual_seed(1)

        def real(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.float64, requires_grad=True)

        index = torch.stack([torch.randperm(EXPERTS)[:CHOICES] for _ in range(TOKENS)])
        if kind == "skewed":
            index = torch.tensor([[1, 0]]).expand(TOKENS, CHOICES).contiguous()
        if kind == "dropped":
            index[1::3, 0] = EXPERTS  # on no rank
        parameters = [
            real(EXPERTS, INNER, HIDDEN),
            real(EXPERTS, HIDDEN, INNER),
            real(EXPERTS, INNER, HIDDEN),
            real(EXPERTS, INNER),
            real(EXPERTS, INNER),
            real(EXPERTS, HIDDEN),
        ]
        tokens = [real(TOKENS, HIDDEN), index, real(TOKENS, CHOICES)]
        rest = (EXPERTS + (kind == "dropped"), False, TEXT)
        return cls(tokens, parameters, torch.randn(TOKENS, HIDDEN, dtype=torch.float64), rest)

    def run(self) -> tuple[Tensor, list[Tensor]]:
        """The result, and gradients of hidden, weights and the parameters."""
        experts, transposed, text = self.rest
        result = torch.ops.autopar.experts(
            *self.tokens, *self.parameters, experts, 0, 1, transposed, text
        )
        leaves = [self.tokens[0], self.tokens[2], *self.parameters]
        return result.detach(), list(torch.autograd.grad(result, leaves, self.seed))
