"""Samples that depend on each other are seen; ordinary models are not suspected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes.analysis.coupled_samples import batch_statistics, coupling_op
from autopar.passes.capture import capture
from autopar.workflow.prepare import prepare
from autopar.workflow.verification import build_real

MODELS = Path(__file__).parents[2] / "end_to_end" / "models.py"


class Model(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.layer(x)).square().mean()


def _sorted_and_back(h: Tensor) -> Tensor:
    """As a mixture of experts does: rows in the order of their expert, then in their own."""
    order = h.argmax(-1).argsort(stable=True)
    done = (h[order] * 2).sin()
    return done[order.argsort()]


def _mixes(mix: Callable[[Tensor], Tensor]) -> bool:
    program = capture(Model(mix), {"x": torch.randn(4, 6)})
    return coupling_op(program) is not None


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: h - h.mean(0, keepdim=True),
        lambda h: h.softmax(0),
        lambda h: h @ h.sum(0),
        lambda h: h - h.amax(0),
        lambda h: h @ h.transpose(0, 1) * 1.0,
        lambda h: (h * 2) @ (h + 1).transpose(0, 1),
        lambda h: h.roll(1, 0),
        lambda h: h.flip(0),
        lambda h: h.sort(0).values,
        lambda h: h.logsumexp(0, keepdim=True) * h,
        lambda h: h / torch.linalg.vector_norm(h),
        lambda h: h / h.norm(dim=0),
        lambda h: F.normalize(h, dim=0),
        lambda h: h @ h.mT,
        lambda h: h * torch.rand(h.shape[0], 1, device=h.device).mean(0),
        lambda h: h * torch.rand(h.shape[0], 1, device=h.device).cumsum(0),
        lambda h: h * torch.randperm(h.shape[0], device=h.device)[:, None],
        lambda h: h.T.softmax(-1),
        lambda h: h - h.max(0).values,
        lambda h: h * h.max(),
        lambda h: torch.cdist(h, h) * 1.0,
        lambda h: h[torch.arange(h.shape[0] - 1, -1, -1, device=h.device)],
        lambda h: F.batch_norm(h, None, None, training=True),
        lambda h: h.var(0) * h,
        lambda h: h * torch.arange(h.shape[0], device=h.device)[:, None],
        lambda h: h.view(-1).roll(1).view(h.shape),
        lambda h: torch.cat([h[1:], h[:1]]),
        lambda h: h.cumsum(0),
        lambda h: h * h.shape[0],
        lambda h: h * h.numel() / 100,
        lambda h: h * torch.full((1,), h.shape[0], device=h.device),
        lambda h: h * torch.ones(h.shape[0], device=h.device).sum(),
        lambda h: h * torch.ones(h.shape[0], device=h.device).cumsum(0)[:, None],
        lambda h: h * (h.shape[0] / 4),
        lambda h: h + torch.eye(16, 6, device=h.device)[torch.arange(h.shape[0], device=h.device)],
    ],
)
def test_mixing_is_seen(mix: Callable[[Tensor], Tensor]) -> None:
    assert _mixes(mix)


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: h.softmax(1),
        lambda h: h - h.mean(1, keepdim=True),
        lambda h: h.view(-1, 2, 3).transpose(1, 2).reshape(-1, 6),
        lambda h: torch.relu(h) * 2 + h,
        lambda h: h.roll(1, 1),
        lambda h: h.flip(1),
        lambda h: h.sort(1).values,
        lambda h: F.normalize(h, dim=1),
        lambda h: h.logsumexp(1, keepdim=True) * h,
        lambda h: torch.cdist(h[:, None], h[:, None] + 1).flatten(1) * h,
        lambda h: h[torch.arange(h.shape[0], device=h.device), h.argmax(1)][:, None] * h,
        lambda h: h.T.roll(1, 0).T,
        lambda h: (h.mT * 2).mT,
        lambda h: torch.ones(h.shape[0], 1, device=h.device) * h,
        lambda h: _sorted_and_back(h),
        lambda h: h.view(h.shape[0], -1) + torch.zeros(h.shape[0], 6, device=h.device),
        lambda h: torch.cat([torch.ones(h.shape[0], 1, device=h.device), h], 1).cumsum(1),
        # Noise of each sample's own.
        lambda h: h * torch.randn(h.shape, device=h.device),
        lambda h: h * (0.9 + torch.rand(h.shape[0], 1, device=h.device)).floor_(),
        lambda h: h * torch.empty(h.shape, device=h.device).uniform_(),
        lambda h: h * h.new_empty((h.shape[0], 1)).bernoulli_(0.9).div_(0.9),
        lambda h: h * torch.randint(0, 9, h.shape, device=h.device),
        lambda h: h * torch.normal(torch.zeros_like(h), 1.0),
        lambda h: _sorted_and_back(h * torch.rand(h.shape[0], 1, device=h.device)),
    ],
)
def test_samples_that_stay_apart(mix: Callable[[Tensor], Tensor]) -> None:
    assert not _mixes(mix)


@pytest.mark.parametrize(
    "loss",
    [
        lambda h: F.cross_entropy(h, torch.arange(h.shape[0], device=h.device) % 6),
        lambda h: F.mse_loss(h[:, :1], h[:, 1].detach()),  # a column against a row
        lambda h: F.mse_loss(h[:, 0], torch.arange(h.shape[0], device=h.device) * 1.0),
    ],
)
def test_a_loss_that_reads_the_place_in_the_batch(loss: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return loss(self.layer(x))

    assert coupling_op(capture(Model(), {"x": torch.randn(4, 6)})) is not None


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3", "gemma2"])
def test_language_models_keep_samples_apart(name: str) -> None:
    model, source = build_real(f"{MODELS}:{name}", None, 0)
    program = capture(model, source.example_inputs)
    assert prepare(program, program.sizes).batch_stays_whole == ""


class Decoder(nn.Module):
    """torch's own layers: attention reads positions before samples, and merges both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(128, 4, 512, 0.0, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.as_tensor(self.decoder(y, self.encoder(x)).square().mean())


def test_cross_attention_keeps_samples_apart() -> None:
    """In 32 bits a softmax over products of random weights makes much of their rounding."""
    program = capture(Decoder(), {"x": torch.randn(8, 32, 128), "y": torch.randn(8, 32, 128)})
    assert prepare(program, program.sizes).batch_stays_whole == ""


class Normed(nn.Module):
    """`mix` beside a batch norm that keeps statistics."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("kept", torch.zeros(6))
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.norm(self.layer(x))).square().mean()


def _statistics(model: nn.Module, **inputs: Tensor) -> frozenset[str] | None:
    program = capture(model, inputs or {"x": torch.randn(4, 6)})
    found = batch_statistics(program)
    return found.names if found is not None else None


@pytest.mark.parametrize(
    ("mix", "count"),
    [
        (lambda h: h.relu(), 3),
        (lambda h: h - h.mean(0), 4),  # with gradient
        (lambda h: h - torch.cat([h, h * 2]).square().mean(0).sqrt(), 4),  # the mean, not its root
        (lambda h: h * h.sum(0), 4),
        (lambda h: h - h.detach().mean(0), 4),  # a user's own statistic, without gradient
        (lambda h: h - h.detach().mean(1, keepdim=True), 3),
        (lambda h: F.batch_norm(h.T, None, None, training=True).T, 3),  # a channel a sample
        (lambda h: F.batch_norm(h.view(-1, 2, 3), None, None, training=True).flatten(1), 4),
    ],
)
def test_only_statistics_mix(mix: Callable[[Tensor], Tensor], count: int) -> None:
    found = _statistics(Normed(mix))
    assert found is not None and len(found) == count, found


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: h.softmax(0),
        lambda h: h - h.detach().amax(0),
        lambda h: h.roll(1, 0),
    ],
)
def test_other_mixing_beside_a_batch_norm_is_seen(mix: Callable[[Tensor], Tensor]) -> None:
    assert _statistics(Normed(mix)) is None


class Keeps(nn.Module):
    """A buffer that takes `new` of the layer's result and of the loss."""

    kept: Tensor

    def __init__(self, new: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("kept", torch.zeros(6))
        self.new = new

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        loss = h.square().mean()
        self.kept.lerp_(self.new(h.detach(), loss.detach()), 0.1)
        return loss


def test_buffers_that_ranks_would_keep_alike() -> None:
    assert _statistics(Keeps(lambda h, loss: torch.ones(6, device=h.device))) == frozenset()
    mean = _statistics(Keeps(lambda h, loss: h.mean(0)))
    assert mean is not None and len(mean) == 1


@pytest.mark.parametrize(
    "new", [lambda h, loss: h[0], lambda h, loss: h.amax(0), lambda h, loss: loss.expand(6)]
)
def test_buffers_that_differ_on_ranks(new: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert _statistics(Keeps(new)) is None


class Lookup(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids).square().mean()  # type: ignore[no-any-return]


def test_a_gradient_scaled_by_counts_over_the_batch() -> None:
    ids = torch.arange(24).view(8, 3) % 5

    def whole(table: nn.Module) -> str:
        program = capture(Lookup(table), {"ids": ids})
        return prepare(program, program.sizes).batch_stays_whole

    counted = whole(nn.Embedding(6, 4, scale_grad_by_freq=True))
    assert "scale_grad_by_freq" in counted and __file__ in counted
    assert whole(nn.EmbeddingBag(6, 4, scale_grad_by_freq=True))
    assert not whole(nn.Embedding(6, 4)) and not whole(nn.EmbeddingBag(6, 4))


def test_sixteen_bits_hide_nothing() -> None:
    """In bfloat16 a maximum over samples is as good as equal to the mean of its halves'."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            shares = self.layer(x).softmax(-1)
            loss: Tensor = x.float().square().mean() + shares.amax(0).square().sum()
            return loss

    assert _statistics(Half().bfloat16(), x=torch.randn(8, 6).bfloat16()) is None
    assert _statistics(Half(), x=torch.randn(8, 6)) is None
