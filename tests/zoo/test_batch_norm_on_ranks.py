"""A CNN with batch norms over dp ranks: losses, parameters and running statistics of one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.warm_ranks import run_on_ranks

ROWS, STEPS, CLASSES = 8, 3, 5
PLANS = {
    2: {
        "dp2 zero0": "dp=2,zero=0",
        "dp2 zero1": "dp=2,zero=1",
        "dp2 zero3 recompute": "dp=2,zero=3,recompute=full",
    },
    4: {
        "dp4": "dp=4,zero=2",
        "dp2 tp2": "dp=2,tp=2,zero=3,weights=split",
        "dp2 pp2": "dp=2,pp=2,zero=1",
    },
}
PAIRS = [(ranks, name) for ranks, plans in PLANS.items() for name in plans]


class Cnn(nn.Module):
    """The first norm is of the inputs; one keeps no statistics, one has no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        widths = [3, 8, 8, 8]
        norms = [nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False, momentum=0.3)]
        norms.append(nn.BatchNorm2d(8, track_running_stats=False))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), norm, nn.ReLU())
            for a, b, norm in zip(widths, widths[1:], norms, strict=False)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def make_model() -> Cnn:
    torch.manual_seed(0)
    return Cnn()


def make_batch(step: int) -> dict[str, Tensor]:
    """Rows that differ in mean and deviation, so that ranks' own statistics would too."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, 3, 6, 6, generator=generator)
    x = x * torch.arange(1, ROWS + 1).view(-1, 1, 1, 1) + torch.arange(ROWS).view(-1, 1, 1, 1)
    labels = torch.randint(CLASSES, (ROWS,), generator=generator)
    labels[:2] = -100  # the first rank's mean is over fewer targets
    return {"x": x, "labels": labels}


def train(program: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(float(program.step(make_batch(step))))
        optimizer.step()
    return losses


def on_ranks(plans: dict[str, str]) -> dict[str, Any]:
    found = {}
    for name, pins in plans.items():
        model = make_model()
        options = {"example_inputs": make_batch(0), "global_batch_size": ROWS, "pins": pins}
        program = autopar.compile(model, **options, timeout_seconds=60)  # type: ignore[arg-type]
        losses = train(program, torch.optim.SGD(program.parameters(), lr=0.05))
        state = program.full_state_dict()
        buffers = {n: b.clone() for n, b in program.named_buffers()}
        evaluated = float(program.eval().step(make_batch(9)))
        same = all(torch.equal(b, buffers[n]) for n, b in program.named_buffers())
        fixed = autopar.compile(model.eval(), **options, timeout_seconds=60)  # type: ignore[arg-type]
        found[name] = {
            "mesh": program.plan.mesh,
            "losses": losses,
            "state": state,
            "buffers": buffers,
            "evaluated": (evaluated, same),
            "fixed statistics": float(fixed.step(make_batch(0))),
            "fixed notes": fixed.plan.notes,
        }
    return found


@pytest.fixture(scope="module")
def results() -> dict[int, list[dict[str, Any]]]:
    return {
        n: run_on_ranks(on_ranks, n, (plans,), timeout_seconds=250) for n, plans in PLANS.items()
    }


@pytest.fixture(scope="module")
def one_device() -> tuple[list[float], Cnn]:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(**make_batch(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize(("ranks", "name"), PAIRS)
def test_training_is_that_of_one_device(
    results: dict[int, Any], one_device: tuple[list[float], Cnn], ranks: int, name: str
) -> None:
    losses, model = one_device
    expected = model.state_dict()
    for found in (r[name] for r in results[ranks]):
        assert found["mesh"].dp > 1
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        for key, value in found["buffers"].items():
            torch.testing.assert_close(value, expected[key], rtol=1e-5, atol=1e-5)
    state = results[ranks][0][name]["state"]
    assert set(state) == set(expected)
    for key, value in expected.items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize(("ranks", "name"), PAIRS)
def test_evaluation_moves_no_statistics(
    results: dict[int, Any], one_device: tuple[list[float], Cnn], ranks: int, name: str
) -> None:
    """Neither without a backward, nor of a model that was captured in eval mode."""
    trained = copy.deepcopy(one_device[1])
    expected = trained(**make_batch(9)).item()
    fresh = make_model().eval()(**make_batch(0)).item()
    for found in (r[name] for r in results[ranks]):
        evaluated, same = found["evaluated"]
        assert same and evaluated == pytest.approx(expected, rel=1e-4)
        assert found["fixed statistics"] == pytest.approx(fresh, rel=1e-5)


def test_own_statistics_of_ranks_would_differ() -> None:
    """The test can fail: halves of the batch alone give another loss."""
    batch = make_batch(0)
    whole = make_model()(**batch).item()
    halves = [make_model()(**{k: v[i : i + 4] for k, v in batch.items()}).item() for i in (0, 4)]
    assert abs((2 * halves[0] + 4 * halves[1]) / 6 - whole) > 1e-3 * whole
