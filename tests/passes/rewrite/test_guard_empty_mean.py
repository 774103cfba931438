"""An empty mask gives a zero gradient where the loss weighs nothing, and nothing else changes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.parts import Parts
from autopar.passes.analysis.loss_form import loss_form
from autopar.passes.capture import capture
from autopar.passes.rewrite.guard_empty_mean import GuardEmptyMean
from autopar.passes.rewrite.simplify import Simplify
from autopar.program import Program


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(self.layer(x), labels, reduction="none")
        mask = (labels > 0).float()
        return (each * mask).sum() / mask.sum()


def run(program: Program, model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    given = {"x": x, "labels": labels}
    values = [
        given[i.target] if i.kind == "input" else model.get_parameter(i.target)
        for i in program.inputs
    ]
    loss: Tensor = fx.Interpreter(program.graph_module).run(*values)[0]
    return loss


def test_an_empty_mask_has_a_finite_gradient() -> None:
    model = Masked()
    inputs = {"x": torch.randn(4, 4), "labels": torch.tensor([0, 1, 2, 0])}
    captured = capture(model, inputs)
    before = Simplify().run(Parts(captured, sizes=captured.sizes)).program
    after = GuardEmptyMean().run(Parts(before, sizes=before.sizes)).program
    assert loss_form(before).kind == loss_form(after).kind == "ratio"
    torch.testing.assert_close(run(after, model, **inputs), model(**inputs))
    (run(after, model, inputs["x"], torch.zeros(4, dtype=torch.long)) * 0).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None and not parameter.grad.any()


def test_a_plain_mean_is_left_alone() -> None:
    class Plain(Masked):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.layer(x), labels)

    program = capture(Plain(), {"x": torch.randn(4, 4), "labels": torch.tensor([0, 1, 2, 0])})
    parts = Parts(program, sizes=program.sizes)
    assert GuardEmptyMean().run(parts) is parts
