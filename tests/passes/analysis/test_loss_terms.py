"""The terms of a loss that read no targets."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.passes.analysis.loss_terms import addends, auxiliary_terms
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
        if self.kind == "from zero":
            return loss + sum(0.1 * part.square().mean() for part in (inner, self.first.weight))
        norm = self.first.weight.square().sum()
        if self.kind == "signed":
            return 2 - (torch.add(loss, norm, alpha=3) - 0.5 * inner.mean() + norm) / 4
        if self.kind == "multiple":
            return loss + 0.1 * (norm + inner.square().mean())
        if self.kind == "stacked":
            return torch.stack([loss, norm]).sum()
        total = loss.float()
        total = total + 0.1 * inner.square().mean()  # as z-losses
        total += 0.2 * self.first.weight.square().sum()
        return total


def captured(kind: str) -> Program:
    inputs = {"x": torch.randn(6, 8), "target": torch.arange(6) % 5}
    return capture(Model(kind), inputs, name="toy")


def factors(program: Program) -> list[tuple[str, float]]:
    """Names and factors of the auxiliary terms, in the order in which they are added."""
    names = auxiliary_terms(program)
    loss = next(n for n in program.graph.nodes if n.name == program.loss)
    terms = list(addends(loss, known=names))
    assert len(terms) > sum(term.node.name in names for term in terms)
    return [(names[t.node.name], t.factor) for t in terms if t.node.name in names]


def test_each_by_its_expression() -> None:
    first, second = "0.1 * inner.square().mean()", "0.2 * self.first.weight.square().sum()"
    assert factors(captured("two")) == [(first, 1), (second, 1)]


def test_a_sum_that_begins_at_zero() -> None:
    program = captured("from zero")
    name = "0.1 * part.square().mean()"
    assert factors(program) == [(name, 1), (name, 1)]
    # The sum of both, which a block may get as one value, has a name too.
    loss = next(n for n in program.graph.nodes if n.name == program.loss)
    assert auxiliary_terms(program)[loss.args[1].name] == name


def test_signs_and_factors() -> None:
    norm = "self.first.weight.square().sum()"
    assert factors(captured("signed")) == [
        (norm, -0.75),
        ("0.5 * inner.mean()", 0.25),
        (norm, -0.25),
    ]


def test_a_multiple_of_auxiliary_terms_is_one() -> None:
    name = "0.1 * (norm + inner.square().mean())"
    assert factors(captured("multiple")) == [(name, 1)]


def test_terms_that_read_the_targets_are_the_loss_itself() -> None:
    assert auxiliary_terms(captured("none")) == {}
    assert auxiliary_terms(captured("targets")) == {}
    assert auxiliary_terms(toys.captured("mlp")) == {}


def test_what_is_no_sum_of_scalars_is_one_term() -> None:
    assert auxiliary_terms(captured("stacked")) == {}
