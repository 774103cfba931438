"""Models with something said from outside: an op with a rule of the user's, marked modules."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.end_to_end.models import llama

ROWS, WIDTH, CLASSES = 4, 16, 8


@torch.library.custom_op("autopar_zoo::gated", mutates_args=())
def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(x @ gate.mT) * (x @ up.mT)


@gated.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], gate.shape[0]))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    x, gate, up = ctx.saved_tensors
    opened, passed = x @ gate.mT, x @ up.mT
    share = opened.sigmoid()
    of_gate = grad * passed * share * (1 + opened * (1 - share))
    of_up = grad * F.silu(opened)
    return of_gate @ gate + of_up @ up, of_gate.mT @ x, of_up.mT @ x


gated.register_autograd(_backward, setup_context=_keep)
# No product that is linear in x: its dim is needed whole, rows and columns are free.
autopar.register_rule(gated, "b* k, n k, n k -> b* n", whole=["k"])


class GatedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) * 0.3)
        self.up = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) * 0.3)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(gated(x, self.gate, self.up))
        return out


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(GatedLayer() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), labels)


def custom_op() -> tuple[nn.Module, dict[str, Any]]:
    return Gated(), {"x": torch.ones(ROWS, WIDTH), "labels": torch.arange(ROWS) % CLASSES}


def marked_layer() -> tuple[nn.Module, dict[str, Any]]:
    """The third of four layers stays whole; the others do not."""
    model, inputs = llama()
    autopar.replicate(model.get_submodule("model.layers.2"))
    return model, inputs


def marked_tied_embedding() -> tuple[nn.Module, dict[str, Any]]:
    """The embedding is marked; the head, which reads the same weight, is not."""
    model, inputs = llama(num_hidden_layers=2, tie_word_embeddings=True)
    autopar.replicate(model.get_submodule("model.embed_tokens"))
    return model, inputs


class DeepSupervision(nn.Module):
    """A loss after every layer, with one head: each stage of a pipeline adds to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        total = torch.zeros((), device=x.device)
        for layer in self.layers:
            x = torch.tanh(layer(x))
            total = total + F.cross_entropy(self.head(x), labels) / len(self.layers)
        return total


def deep_supervision() -> tuple[nn.Module, dict[str, Any]]:
    inputs = {"x": torch.ones(ROWS, WIDTH), "labels": torch.arange(ROWS) % CLASSES}
    return DeepSupervision(), inputs


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.scores = nn.Linear(WIDTH, CLASSES)
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, parts: dict[str, tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        first, second = parts["pair"]
        x = x * first[:, None] + second[:, None]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.scores(x), self.value(x)


def weighted_losses(
    outputs: tuple[Tensor, Tensor], labels: Tensor, weights: Tensor, scale: float = 0.1
) -> Tensor:
    """Two losses of two heads; a weight for each sample, which the model never sees."""
    scores, value = outputs
    each = F.cross_entropy(scores, labels, reduction="none")
    return (each * weights).mean() + scale * (value[:, 0] - weights).square().mean()


def two_losses() -> tuple[nn.Module, dict[str, Any], Any]:
    rows = torch.arange(ROWS)
    pair = (torch.ones(ROWS), torch.ones(ROWS))
    inputs = {"x": torch.ones(ROWS, WIDTH), "parts": {"pair": pair}}
    return TwoHeads(), {**inputs, "labels": rows % CLASSES, "weights": rows * 0.5}, weighted_losses


class Straight(torch.autograd.Function):
    """Rounds to a grid; the gradient passes inside a range, as in quantisation-aware training."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: float) -> Tensor:
        ctx.save_for_backward(x)
        return (x / step).round() * step

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() < 1, grad, 0.0), None


class QuantisedLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weight = Straight.apply(self.inner.weight, 0.125)
        return Straight.apply(F.linear(x, weight, self.inner.bias), 0.25)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(QuantisedLayer() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def own_backward() -> tuple[nn.Module, dict[str, Any]]:
    """Functions with a backward of their own, of values and of weights."""
    return Quantised(), {"x": torch.ones(ROWS, WIDTH), "y": torch.ones(ROWS, WIDTH)}
