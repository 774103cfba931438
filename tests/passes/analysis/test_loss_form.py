"""How micro-batch losses combine: recognised forms, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.passes.analysis.loss_form import loss_form
from autopar.passes.capture import capture
from autopar.workflow.prepare import prepare

Loss = Callable[[Tensor, Tensor], Tensor]


class Classifier(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.layer(x), labels)


def _form(loss: Loss) -> str:
    inputs = {"x": torch.randn(4, 8), "labels": torch.zeros(4, dtype=torch.long)}
    program = capture(Classifier(loss), inputs)
    return loss_form(program).kind


def _masked_mean(logits: Tensor, labels: Tensor) -> Tensor:
    each = F.cross_entropy(logits, labels, reduction="none")
    mask = (labels > 0).float()
    return (each * mask).sum() / mask.sum()


def _guarded(least: float, of_mask: bool = True) -> Loss:
    """A masked mean whose divisor is kept from 0 as people write it."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        each = F.cross_entropy(logits, labels, reduction="none")
        mask = (labels > 0).to(logits.dtype) if of_mask else labels.to(logits.dtype) * 0.1
        return (each * mask).sum() / mask.sum().clamp(min=least)

    return loss


FORMS: dict[str, tuple[str, Loss]] = {
    "cross entropy": ("targets", F.cross_entropy),
    "half of it": ("targets", lambda x, y: F.cross_entropy(x, y) * 0.5),
    "in another dtype": ("targets", lambda x, y: F.cross_entropy(x.double(), y).float()),
    "negative log likelihood": ("targets", lambda x, y: F.nll_loss(x.log_softmax(1), y)),
    "smoothed": ("targets", lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1)),
    "a total from zero": (
        "targets",
        lambda x, y: torch.zeros((), device=x.device) + F.cross_entropy(x, y) + x.new_zeros(()),
    ),
    "a sum from zero": ("sum", lambda x, y: x.new_zeros(()) + x.square().sum()),
    "summed": ("sum", lambda x, y: F.cross_entropy(x, y, reduction="sum")),
    "mean of squares": ("mean", lambda x, y: x.square().mean()),
    "two means": ("mean", lambda x, y: x.square().mean() + x.abs().mean()),
    "sum over the batch size": ("mean", lambda x, y: x.square().sum() / x.shape[0]),
    "divergence": (
        "mean",
        lambda x, y: F.kl_div(x.log_softmax(1), x.softmax(1).detach() + 0.1, reduction="batchmean"),
    ),
    "binary": ("mean", lambda x, y: F.binary_cross_entropy(x.sigmoid(), x.sigmoid().detach())),
    "over the square of the batch size": (
        "unknown",
        lambda x, y: x.square().sum() / (x.shape[0] * x.shape[0]),
    ),
    "masked mean": ("ratio", _masked_mean),
    "masked mean, guarded": ("ratio", _guarded(1)),
    "masked mean, guarded by less": ("ratio", _guarded(0.5)),
    "masked mean, at least two": ("unknown", _guarded(2)),
    "weighted mean, guarded": ("unknown", _guarded(1, of_mask=False)),
    "class weights": ("unknown", lambda x, y: F.cross_entropy(x, y, torch.ones_like(x[0]))),
    "two kinds of mean": ("targets", lambda x, y: F.cross_entropy(x, y) + x.square().mean()),
    "z-loss": (
        "targets",
        lambda x, y: 1e-2 * x.logsumexp(-1).square().mean() + F.cross_entropy(x, y),
    ),
    "a mean and a sum": ("unknown", lambda x, y: F.cross_entropy(x, y) + x.square().sum()),
    "poisson": ("mean", lambda x, y: F.poisson_nll_loss(x, x.detach().abs())),
    "margin of classes": ("mean", F.multi_margin_loss),
    "margin of pairs": ("mean", lambda x, y: F.margin_ranking_loss(x, -x, x.detach().sign())),
    "triplets": ("mean", lambda x, y: F.triplet_margin_loss(x, 2 * x, -x)),
    "cosine": ("mean", lambda x, y: F.cosine_embedding_loss(x, -x, y % 2 * 2 - 1)),
    "sum of cosines": (
        "sum",
        lambda x, y: F.cosine_embedding_loss(x, -x, y % 2 * 2 - 1, reduction="sum"),
    ),
    "of each target, and squares": (
        "mean",
        lambda x, y: F.cross_entropy(x, y, reduction="none").mean() + x.pow(2).mean(),
    ),
    "of each target, summed": ("sum", lambda x, y: F.cross_entropy(x, y, reduction="none").sum()),
    "each target against their mean": (
        "unknown",
        lambda x, y: (lambda each: (each - each.mean()).square().mean())(
            F.cross_entropy(x, y, reduction="none")
        ),
    ),
    "mean of a scalar": ("targets", lambda x, y: F.cross_entropy(x, y).mean()),
    "stacked": ("mean", lambda x, y: torch.stack([x.square().mean(), x.abs().mean()]).sum()),
    "mean of a stack": ("mean", lambda x, y: torch.stack([x.abs().mean(), x.exp().mean()]).mean()),
    "stacked sums and means": (
        "unknown",
        lambda x, y: torch.stack([x.square().mean(), x.sum()]).sum(),
    ),
    "Python's sum": ("mean", lambda x, y: sum([x.square().mean(), x.abs().mean()])),
    "scaled by alpha": ("sum", lambda x, y: torch.add(x.sum(), x.square().sum(), alpha=0.5)),
    "a mean and a constant": ("targets", lambda x, y: F.cross_entropy(x, y) + 1.0),
    "a sum and a constant": ("unknown", lambda x, y: x.square().sum() + 1.0),
    "square root of a mean": ("unknown", lambda x, y: x.square().mean().sqrt()),
    "mean over classes of a sum": ("unknown", lambda x, y: x.sum(0).mean()),
}


@pytest.mark.parametrize("name", FORMS)
def test_form_is_recognised(name: str) -> None:
    expected, loss = FORMS[name]
    assert _form(loss) == expected


@pytest.mark.parametrize("name", [n for n, (form, _) in FORMS.items() if form != "unknown"])
def test_parts_combine_as_the_form_says(name: str) -> None:
    """The definition itself, on numbers: weighted losses of two unequal halves give the whole."""
    form, loss = FORMS[name]
    torch.manual_seed(0)
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.tensor([1, 0, 3, -100, 2, 4])
    if name in ("two kinds of mean", "z-loss"):  # right for equal counts alone: see `even`
        labels[0] = -100
    if name.startswith("masked mean") or "margin" in name:
        labels = labels.clamp_min(0)
    parts = [slice(0, 3), slice(3, 6)]
    counts = {
        "targets": [float((labels[p] != -100).sum()) for p in parts],
        "ratio": [float((labels[p] > 0).sum()) for p in parts],
        "mean": [1.0, 1.0],
        "sum": [1.0, 1.0],
    }[form]
    total = 1.0 if form == "sum" else sum(counts)
    combined = sum(
        float(loss(logits[p], labels[p])) * c / total for p, c in zip(parts, counts, strict=True)
    )
    assert combined == pytest.approx(float(loss(logits, labels)), rel=1e-6)


def test_unknown_form_keeps_the_batch_whole() -> None:
    import autopar
    from autopar.errors import UsageError

    model = Classifier(lambda x, y: x.square().mean().sqrt())
    inputs = {"x": torch.randn(4, 8), "labels": torch.zeros(4, dtype=torch.long)}
    plan = autopar.plan(model, "cpu:1", example_inputs=inputs, global_batch_size=8)
    assert (plan.mesh.dp, plan.microbatches) == (1, 1)
    assert any("not split" in note for note in plan.notes)
    with pytest.raises(UsageError, match="dp=2"):
        autopar.plan(model, "cpu:2", example_inputs=inputs, global_batch_size=8, pins="dp=2")


def test_prepare_marks_the_program() -> None:
    inputs = {"x": torch.randn(4, 8), "labels": torch.zeros(4, dtype=torch.long)}
    whole = capture(Classifier(lambda x, y: x.square().mean().sqrt()), inputs)
    assert "no mean or sum" in prepare(whole, whole.sizes).batch_stays_whole
    stacked = capture(Classifier(FORMS["stacked"][1]), inputs)
    assert prepare(stacked, stacked.sizes).batch_stays_whole == ""
    parts = capture(Classifier(F.cross_entropy), inputs)
    assert prepare(parts, parts.sizes).batch_stays_whole == ""


class Penalised(Classifier):
    """With a term that reads no sample."""

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.layer(x), labels) + 0.1 * self.layer.weight.square().sum()


@pytest.mark.parametrize("loss", ["cross entropy", "two kinds of mean", "margin of classes"])
def test_a_term_without_samples_keeps_the_form_of_a_mean(loss: str) -> None:
    inputs = {"x": torch.randn(4, 8), "labels": torch.zeros(4, dtype=torch.long)}
    form, function = FORMS[loss]
    assert loss_form(capture(Penalised(function), inputs)).kind == form
    summed = Penalised(lambda x, y: F.cross_entropy(x, y, reduction="sum"))
    assert loss_form(capture(summed, inputs)).kind == "unknown"

    class ByNumber(Classifier):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            norm = self.layer.weight.square().sum() / x.shape[0]
            return self.loss(self.layer(x), labels) + norm

    assert loss_form(capture(ByNumber(F.cross_entropy), inputs)).kind == "unknown"


def test_only_a_sum_of_two_kinds_asks_for_even_parts() -> None:
    inputs = {"x": torch.randn(4, 8), "labels": torch.zeros(4, dtype=torch.long)}

    def even(name: str) -> bool:
        return loss_form(capture(Classifier(FORMS[name][1]), inputs)).even

    assert even("two kinds of mean") and even("z-loss")
    assert not even("cross entropy") and not even("triplets")


def test_a_clamped_count_of_fractions_has_a_remedy() -> None:
    inputs = {"x": torch.randn(4, 8), "labels": torch.zeros(4, dtype=torch.long)}
    program = capture(Classifier(FORMS["weighted mean, guarded"][1]), inputs)
    assert "cast the mask to bool or int" in prepare(program, program.sizes).batch_stays_whole
