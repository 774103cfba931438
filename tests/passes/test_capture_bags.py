"""embedding_bag on a table of indices is a lookup and a reduction of the same value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autopar.passes.analysis.coupled_samples import coupling_op
from autopar.passes.capture import capture
from autopar.passes.capture_bags import bags_of_rows

IDS = torch.tensor([[1, 0, 3, 1], [2, 2, 2, 2], [5, 4, 3, 2]])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2, -4])
def test_value_and_gradient(mode: str, padding: int | None) -> None:
    weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    given: dict[str, Any] = {"mode": mode, "padding_idx": padding}
    bags, expected = bags_of_rows(IDS, weight, **given), F.embedding_bag(IDS, weight, **given)
    assert bags is not None
    torch.testing.assert_close(bags, expected)
    torch.testing.assert_close(
        torch.autograd.grad(bags.square().sum(), weight),
        torch.autograd.grad(expected.square().sum(), weight),
    )


def test_weights_of_samples() -> None:
    weight, factors = torch.randn(6, 5), torch.rand(3, 4)
    given: dict[str, Any] = {"mode": "sum", "per_sample_weights": factors}
    bags = bags_of_rows(IDS, weight, **given)
    assert bags is not None
    torch.testing.assert_close(bags, F.embedding_bag(IDS, weight, **given))


@pytest.mark.parametrize("given", [{"max_norm": 1.0}, {"sparse": True, "mode": "sum"}])
def test_what_a_lookup_can_not_do_stays(given: dict[str, Any]) -> None:
    assert bags_of_rows(IDS, torch.randn(6, 5), **given) is None
    assert bags_of_rows(IDS.flatten(), torch.randn(6, 5), torch.tensor([0, 4])) is None


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(6, 4, padding_idx=0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square().mean()  # type: ignore[no-any-return]


def test_bags_are_apart_when_captured() -> None:
    program = capture(Bags(), {"ids": torch.arange(24).view(8, 3) % 6})
    names = {str(n.target) for n in program.graph.nodes}
    assert "aten.embedding.default" in names and "batch" in program.symbols
    assert coupling_op(program) is None
