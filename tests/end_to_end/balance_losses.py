"""Losses in which samples meet through sums and means, on ranks beside one device."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS, WIDTH, CLASSES = 64, 6, 4
Form = Callable[[Tensor, Tensor, Tensor], Tensor]

# Of logits [rows, classes], probabilities, and the chosen class one-hot.
FORMS: dict[str, Form] = {
    "means": lambda h, p, c: CLASSES * (c.mean(0) * p.mean(0)).sum(),
    "share of a sum": lambda h, p, c: CLASSES * (c.sum(0) / c.sum(0).sum() * p.mean(0)).sum(),
    "entropy of a share": lambda h, p, c: (
        -(p.sum(0) / p.sum(0).sum() * (p.sum(0) / p.sum(0).sum()).log()).sum()
    ),
    "variation": lambda h, p, c: (p.sum(0) / p.sum(0).mean() - 1).square().mean(),
    "clamped counts": lambda h, p, c: (c.sum(0).clamp(max=20.0) * p.mean(0)).sum(),
    "hinge of a mean": lambda h, p, c: (20 * h).mean(0).add(4.0).relu().square().sum(),
    "clamped mean": lambda h, p, c: (20 * h).mean(0).clamp(-3.0, 3.0).square().sum(),
    "sigmoid of a small mean": lambda h, p, c: torch.sigmoid(1e-3 * h.mean(0)).square().sum(),
    "largest mean": lambda h, p, c: p.mean(0).max(),
    "two layers": lambda h, p, c: (
        torch.cat([p, h.tanh()]).mean(0) * (torch.cat([c, c]).sum(0) / h.shape[0])
    ).sum(),
    "number of samples": lambda h, p, c: (
        1e-2 * p[:, 0] * torch.ones(h.shape[0], device=h.device).sum()
    ).mean(),
    "centred": lambda h, p, c: (h - h.mean(0)).square().mean(),
}


class Balanced(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(self.first(x).tanh())
        chosen = functional.one_hot(logits.argmax(-1), CLASSES).to(logits.dtype)
        extra = self.form(logits, logits.softmax(-1), chosen)
        loss: Tensor = logits.square().mean() + extra
        return loss


def errors(ranks: int) -> dict[str, tuple[str, float]]:
    """By form: the mesh, and the largest error of loss and gradients relative to their size."""
    import autopar

    found = {}
    for name, form in FORMS.items():
        torch.manual_seed(0)
        model = Balanced(form)
        reference, x = copy.deepcopy(model), torch.randn(ROWS, WIDTH)
        program = autopar.compile(
            model,
            f"cpu:{ranks}",
            example_inputs={"x": x},
            global_batch_size=ROWS,
            pins=f"dp={ranks}",
            timeout_seconds=60,
        )
        loss, gradients = float(program.step(x=x)), program.full_gradients()
        whole = reference(x)
        torch.autograd.backward(whole)
        worst = abs(loss / float(whole.detach()) - 1)
        for key, gradient in gradients.items():
            expected = reference.get_parameter(key).grad
            assert expected is not None
            worst = max(worst, float((gradient - expected).norm() / expected.norm()))
        found[name] = str(program.plan.mesh), worst
    return found
