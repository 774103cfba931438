"""How much longer a backward takes by being divided in two, as zero-bubble pipelines do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from autopar.runtime.device_rates import finish
from autopar.runtime.divided_backward import input_backward

Tensor = torch.Tensor
LAYERS, ROUNDS, WARM = 4, 12, 3


def measured_division(device: torch.device) -> float:
    """By which fraction of itself the backward of a few layers gets longer, at least 0: what is
    kept for the second half is in no cache any more, and autograd walks its graph twice."""
    width, tokens = (256, 512) if device.type == "cpu" else (4096, 8192)
    layers = nn.ModuleList(_Layer(width) for _ in range(LAYERS)).to(device)
    weights = list(layers.parameters())
    gradient = torch.randn(tokens, width, device=device)

    def run(backward: Callable[[Tensor, Tensor], None]) -> float:
        received = torch.randn(tokens, width, device=device, requires_grad=True)
        value = received
        for layer in layers:
            value = layer(value)
        finish(device)
        begin = time.perf_counter()
        backward(value, received)
        finish(device)
        return time.perf_counter() - begin

    def whole(value: Tensor, _: Tensor) -> None:
        value.backward(gradient)  # type: ignore[no-untyped-call]

    def divided(value: Tensor, received: Tensor) -> None:
        _, later = input_backward((value,), (gradient,), [received], weights)
        later.run(lambda weights: None)

    # In turn, so that whatever else the machine does meets both alike.
    times = [(run(whole), run(divided)) for _ in range(WARM + ROUNDS)][WARM:]
    one, two = (float(statistics.median(found)) for found in zip(*times, strict=True))
    return max(0.0, two / one - 1.0)


class _Layer(nn.Module):
    """A norm and two products around a value that is passed on, as in most blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, value: Tensor) -> Tensor:
        changed: Tensor = self.down(F.silu(self.up(self.norm(value))))
        return value + changed
