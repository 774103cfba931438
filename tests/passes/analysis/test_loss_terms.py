"""The terms of a loss that read no targets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.passes.analysis.loss_terms import added, auxiliary_terms
from autopar.passes.capture import capture
from autopar.program import Program
from tests.passes import toys


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.head, self.kind = nn.Linear(8, 8), nn.Linear(8, 5), kind

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        inner = self.first(x)
        loss = functional.cross_entropy(self.head(inner), target)
        if self.kind == "none":
            return loss
        if self.kind == "targets":
            return loss + 0.1 * functional.cross_entropy(inner, target)
        total = loss.float()
        total = total + 0.1 * inner.square().mean()  # as z-losses
        total += 0.2 * self.first.weight.square().sum()
        return total


def captured(kind: str) -> Program:
    inputs = {"x": torch.randn(6, 8), "target": torch.arange(6) % 5}
    return capture(Model(kind), inputs, name="toy")


def test_each_by_its_line() -> None:
    program = captured("two")
    found = auxiliary_terms(program)
    names = ["total + 0.1 * inner.square().mean()", "0.2 * self.first.weight.square().sum()"]
    assert [term.name for term in found] == names
    loss = next(n for n in program.graph.nodes if n.name == program.loss)
    terms = [n.name for n in added(loss)]
    assert len(terms) == 3 and terms[1:] == [term.node for term in found]


def test_terms_that_read_the_targets_are_the_loss_itself() -> None:
    assert auxiliary_terms(captured("none")) == ()
    assert auxiliary_terms(captured("targets")) == ()
    assert auxiliary_terms(toys.captured("mlp")) == ()
