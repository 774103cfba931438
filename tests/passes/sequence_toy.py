"""A language model whose attention is causal by itself, for tests of splitting its sequence."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

import autopar.runtime.collectives  # noqa: F401 - registers the ops that the passes insert
from autopar.op_call import Bindings
from autopar.parts import Slot
from autopar.passes.analysis.blocks import analyse_blocks
from autopar.passes.capture import capture
from autopar.passes.rewrite.cut_blocks import cut_block
from autopar.program import Program

WIDTH, HEADS, KEY_HEADS, VOCABULARY = 32, 4, 2, 64


class Layer(nn.Module):
    """Grouped attention; `mix` may do something else along the sequence first."""

    def __init__(self, mix: Callable[[Tensor], Tensor] | None, causal: bool) -> None:
        super().__init__()
        self.mix, self.causal = mix, causal
        self.norm = nn.LayerNorm(WIDTH)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.mix is not None:
            h = self.mix(h)
        q = self.q(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2 * KEY_HEADS, -1)).transpose(1, 2).chunk(2, 1)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        return x + y.transpose(1, 2).flatten(2)


class Toy(nn.Module):
    def __init__(
        self,
        mix: Callable[[Tensor], Tensor] | None = None,
        *,
        causal: bool = True,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(mix, causal) for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def program(length: int = 16, *, causal: bool = True) -> Program:
    ids = torch.zeros(2, length, dtype=torch.int64, device="meta")
    with torch.device("meta"):
        model = Toy(causal=causal)
    return capture(model, {"ids": ids, "labels": ids}, name="toy", dtype=torch.float32)


def layer(*, causal: bool = True) -> tuple[fx.GraphModule, tuple[Slot, ...]]:
    """The static graph of one layer for one sample of 16 positions."""
    found = program(causal=causal)
    block = analyse_blocks(found).block("layers.0")
    return cut_block(found, block, Bindings(found.symbols, {**found.sizes, "batch": 1}))


# By rows of queries, with keys and values gathered.
ROWS = {
    "layer_norm": "shard d1", "linear": "shard b1", "unflatten": "shard f0",
    "transpose": "shard d1", "linear.1": "shard b1", "unflatten.1": "shard f0",
    "transpose.1": "shard d1", "chunk": "shard d2", "getitem": "shard d2", "getitem.1": "shard d2",
    "scaled_dot_product_attention": "shard q", "transpose.2": "shard d2", "flatten": "shard f0",
    "add": "shard d1",
}  # fmt: skip
