"""Which ops take statistics that ranks can sum, and over which dims."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.passes.analysis.batch_statistics import (
    is_batch_norm,
    statistic_dims,
    updates_of_batch,
)
from autopar.passes.capture import capture


class Model(nn.Module):
    def __init__(self, track: bool = True) -> None:
        super().__init__()
        self.layer = nn.Conv1d(3, 4, 1)
        self.norm = nn.BatchNorm1d(4, track_running_stats=track)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.layer(x))
        return (h - h.mean(-1, keepdim=True) + h.detach().amax(2, keepdim=True)).square().mean()


def found(model: nn.Module) -> dict[fx.Node, frozenset[int]]:
    graph = capture(model, {"x": torch.randn(4, 3, 5)}).graph
    dims = {n: statistic_dims(n) for n in graph.nodes}
    return {n: d for n, d in dims.items() if d is not None}


def test_a_batch_norm_and_what_it_keeps() -> None:
    statistics = found(Model())
    names = [n.target._opname for n in statistics]  # type: ignore[union-attr]
    assert sorted(names) == ["batch_norm", "mean", "var"]
    assert set(statistics.values()) == {frozenset({0, 2})}
    assert sum(is_batch_norm(n) for n in statistics) == 1


def test_without_running_statistics_it_is_the_norm_alone() -> None:
    for model in (Model(track=False), Model(track=False).eval()):
        assert [is_batch_norm(n) for n in found(model)] == [True]


def test_with_fixed_statistics_there_is_none() -> None:
    assert found(Model().eval()) == {}


def test_forms_that_have_no_rewrite_do_not_count() -> None:
    class Others(Model):
        def forward(self, x: Tensor) -> Tensor:
            h = self.layer(x)
            own = h.detach()
            biased = own.var(0, correction=0) + own.mean(0, keepdim=True) + own.std(0)
            return (F.relu(h) * biased).mean()

    assert found(Others()) == {}


class Buffers(nn.Module):
    """A counter, a mean of the samples, noise, and a norm of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)
        for name in ("count", "mean", "noise", "norm"):
            self.register_buffer(name, torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        with torch.no_grad():
            self.count += 1
            self.mean = 0.9 * self.mean + 0.1 * h.mean()
            self.noise = torch.rand((), device=x.device)
            torch.linalg.vector_norm(self.layer.weight, out=self.norm)
        return h.square().mean() / (1 + self.norm)


def test_buffers_that_are_no_matter_of_the_batch() -> None:
    program = capture(Buffers(), {"x": torch.randn(4, 3)})
    assert set(program.updates) == {"count", "mean", "noise", "norm"}
    assert set(updates_of_batch(program)) == {"mean", "noise"}
