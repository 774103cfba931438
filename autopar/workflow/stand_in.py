"""A transformer made from the numbers that a table of measurements prints, on the meta device.

Published rows name layers, hidden size, heads and so on, not code. A stand-in has the same products
and the same kept activations, and is captured, sharded and priced like any other model. Two layers
are enough: all further ones are alike (`autopar.workflow.evaluator` repeats them).

Written out attention stands for the kernels used before fused attention: scores, softmax and
dropout are tensors of their own. The dropout is a threshold, which reads and writes as much; its
mask (one byte per score) is not kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from autopar.workflow.stand_in_experts import Experts

EXAMPLE_BATCH = 2
LAYERS = 2


@dataclass(frozen=True, slots=True)
class Architecture:
    """Shapes of one decoder layer and of both ends of the model.

    `gated`: a gated MLP of three matrices, RMS norms and no biases, as in Llama; otherwise two
    matrices, layer norms and biases, as in GPT. `tied`: the output head shares the embedding's
    weight. `fused_attention`: one kernel instead of scores, softmax and dropout. `wide_loss`: the
    loss is computed from a float32 copy of the logits. `experts`: how many MLPs of `ffn` columns a
    layer has (0: one, and no router), of which each token takes `topk`. `head_size`: columns of a
    head (0: the hidden size over the heads).
    """

    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool
    tied: bool
    fused_attention: bool = True
    wide_loss: bool = True
    experts: int = 0
    topk: int = 0
    head_size: int = 0

    @property
    def head(self) -> int:
        return self.head_size or self.hidden // self.heads

    @property
    def layer_parameters(self) -> int:
        """Matrix elements of one layer."""
        attention = self.hidden * self.head * 2 * (self.heads + self.kv_heads)
        mlp = (3 if self.gated else 2) * self.hidden * self.ffn
        return attention + max(1, self.experts) * mlp + self.experts * self.hidden

    def parameters(self, layers: int) -> int:
        """Matrix elements of the whole model: norms, biases and positions are left out."""
        return layers * self.layer_parameters + (1 if self.tied else 2) * self.vocab * self.hidden


class Attention(nn.Module):
    """Causal self-attention with separate query, key and value products."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.head = shape.head
        self.fused = shape.fused_attention
        self.rotary = shape.gated
        self.groups = shape.heads // shape.kv_heads
        bias = not shape.gated
        narrow = shape.kv_heads * self.head
        self.query = nn.Linear(shape.hidden, shape.heads * self.head, bias=bias)
        self.key = nn.Linear(shape.hidden, narrow, bias=bias)
        self.value = nn.Linear(shape.hidden, narrow, bias=bias)
        self.out = nn.Linear(shape.heads * self.head, shape.hidden, bias=bias)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        q, k, v = (
            product(x).unflatten(2, (-1, self.head)).transpose(1, 2)
            for product in (self.query, self.key, self.value)
        )
        if self.rotary:
            q, k = rotate(q, angles), rotate(k, angles)
        if self.fused:
            mixed = F.scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=self.groups > 1
            )
        else:
            scores = F.softmax(torch.matmul(q, k.transpose(2, 3)), dim=3)
            mixed = torch.matmul(F.threshold(scores, 0.1, 0.0), v)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def rotate(x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotary positions: `x` [b, heads, s, d], angles [s, d]."""
    first, second = x.chunk(2, 3)
    return x * angles[0] + torch.cat((-second, first), 3) * angles[1]


class MLP(nn.Module):
    """Three matrices, or two with biases."""

    def __init__(self, hidden: int, inner: int, *, gated: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, inner, bias=False) if gated else None
        self.up = nn.Linear(hidden, inner, bias=not gated)
        self.down = nn.Linear(inner, hidden, bias=not gated)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        return self.down(y)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """Attention and MLP (or experts), each behind a norm and added to what came in."""

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        norm = nn.RMSNorm if shape.gated else nn.LayerNorm
        self.first_norm, self.second_norm = norm(shape.hidden), norm(shape.hidden)
        self.attention = Attention(shape)
        if shape.experts:
            sizes = shape.hidden, shape.ffn, shape.experts, shape.topk
            self.mlp: nn.Module = Experts(*sizes, gated=shape.gated)
        else:
            self.mlp = MLP(shape.hidden, shape.ffn, gated=shape.gated)

    def forward(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.first_norm(x), angles)
        return x + self.mlp(self.second_norm(x))  # type: ignore[no-any-return]


class StandIn(nn.Module):
    """`LAYERS` layers between an embedding and a head; returns the loss of next-token prediction.

    Inputs are `input_ids` and `labels`, [batch, sequence].
    """

    def __init__(self, shape: Architecture) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(LAYERS))
        self.norm = (nn.RMSNorm if shape.gated else nn.LayerNorm)(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocab, bias=False)
        if shape.tied:
            self.head.weight = self.embed.weight
        self.wide_loss = shape.wide_loss
        self.frequencies = shape.head // 2

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        steps = torch.arange(self.frequencies, device=x.device, dtype=torch.float32)
        positions = torch.arange(input_ids.shape[1], device=x.device, dtype=torch.float32)
        angle = positions[:, None] * torch.exp(steps * -0.1)[None, :]
        angle = torch.cat((angle, angle), 1)
        angles = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, angles)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float() if self.wide_loss else logits, labels.flatten())


def stand_in(
    shape: Architecture, sequence: int, dtype: torch.dtype
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The module on the meta device, in training mode, and inputs for it."""
    with torch.device("meta"):
        model = StandIn(shape).to(dtype).train()
        inputs = {
            name: torch.empty(EXAMPLE_BATCH, sequence, dtype=torch.int64)
            for name in ("input_ids", "labels")
        }
    return model, inputs
