"""Only a mask that is the causal one for every batch is replaced, and the numbers stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from autopar.parts import Parts
from autopar.passes.capture import capture
from autopar.passes.rewrite.replace_causal_mask import ReplaceCausalMask
from autopar.passes.rewrite.simplify import Simplify
from autopar.program import Program
from tests.passes import toys

LENGTH = 6
Make = Callable[[torch.Tensor], torch.Tensor]


class Attention(nn.Module):
    """Attention under the mask that `make` builds from positions."""

    def __init__(self, make: Make, dropout: float = 0.0) -> None:
        super().__init__()
        self.make, self.dropout = make, dropout
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mask = self.make(torch.arange(x.shape[1], device=x.device))
        out = nn.functional.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.dropout)
        return out.square().sum()


X = torch.randn(2, LENGTH, 8, generator=torch.Generator().manual_seed(0))
MASKS: dict[str, tuple[Make, bool]] = {
    "causal": (lambda p: p[None, :] <= p[:, None], True),
    "causal, a row per head": (lambda p: (p[None, :] <= p[:, None]).expand(1, 1, -1, -1), True),
    "causal, floating": (
        lambda p: torch.zeros(len(p), len(p), device=p.device).masked_fill(
            p[None, :] > p[:, None], torch.finfo(torch.float32).min
        ),
        True,
    ),
    "window": (lambda p: (p[None, :] <= p[:, None]) & (p[:, None] - p[None, :] < 3), False),
    "whole": (lambda p: p[None, :] >= 0 * p[:, None], False),
    "prefix": (lambda p: (p[None, :] <= p[:, None]) | (p[None, :] < 2), False),
    "bias": (lambda p: -(p[:, None] - p[None, :]).abs().float(), False),
    "soft causal": (
        lambda p: torch.zeros(len(p), len(p), device=p.device).masked_fill(
            p[None, :] > p[:, None], -3.0
        ),
        False,
    ),
}


def rewritten(model: nn.Module, inputs: toys.Inputs) -> Program:
    parts = Simplify().run(Parts(capture(model, inputs)))
    return ReplaceCausalMask().run(parts.evolve(sizes=parts.program.sizes)).program


def attention_of(program: Program) -> list[fx.Node]:
    return [
        n
        for n in program.graph.nodes
        if getattr(n.target, "_opname", "") == "scaled_dot_product_attention"
    ]


@pytest.mark.parametrize("name", MASKS)
def test_only_causal_masks_are_replaced(name: str) -> None:
    make, causal = MASKS[name]
    model = Attention(make)
    program = rewritten(model, {"x": X})
    (node,) = attention_of(program)
    assert (node.args[3:6] == (None, 0.0, True)) == causal
    if causal:
        # The ops that made the mask are gone, and the numbers are the same.
        assert not any("arange" in n.name for n in program.graph.nodes)
        state = dict(model.named_parameters())
        values = [X if i.kind == "input" else state[i.target] for i in program.inputs]
        torch.testing.assert_close(program.graph_module(*values)[0], model(X))


def test_dropout_is_kept() -> None:
    (node,) = attention_of(rewritten(Attention(MASKS["causal"][0], 0.25), {"x": X}))
    assert node.args[3:6] == (None, 0.25, True)


def test_a_mask_from_the_batch_is_never_taken_for_causal() -> None:
    class Padded(Attention):
        def forward(self, x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            positions = torch.arange(x.shape[1], device=x.device)
            mask = (positions[None, :] <= positions[:, None]) & keep[:, None, None, :]
            return nn.functional.scaled_dot_product_attention(q, k, v, mask).sum()

    keep = torch.ones(2, LENGTH, dtype=torch.bool)
    (node,) = attention_of(rewritten(Padded(MASKS["causal"][0]), {"x": X, "keep": keep}))
    assert isinstance(node.args[3] if len(node.args) > 3 else node.kwargs["attn_mask"], fx.Node)


def test_transformers_models() -> None:
    for name in ("llama", "qwen3", "gpt2"):
        nodes = attention_of(toys.simplified(name))
        assert len(nodes) == 4 and all(n.args[5] is True for n in nodes), name
    # Every second layer of Gemma 2 has a window, shorter than this sequence.
    windows = [n.args[5:6] for n in attention_of(toys.simplified("gemma2"))]
    assert not windows or windows.count((True,)) in (0, 2)
