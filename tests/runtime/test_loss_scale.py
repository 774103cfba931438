"""Loss scaling on real ranks: what float16 would lose is kept, an overflow is seen everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.runtime.loss_scale import checked_scale
from tests.runtime.test_state import make_program
from tests.runtime.toy import make_batch
from tests.warm_ranks import run_on_ranks

LAYOUTS = {
    "pp2": {"mesh": Mesh(pp=2)},
    "tp2": {"mesh": Mesh(tp=2)},
    "dp2 zero0": {"mesh": Mesh(dp=2)},
    "dp2 zero3": {"mesh": Mesh(dp=2), "zero": 3},
}
# A loss this small has gradients below float16's least number, 6e-8.
SMALL, SCALE = 2.0**-18, 2.0**10


def scaled_steps() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, options in LAYOUTS.items():
        program = make_program({**options, "precision": "fp16"}, dtype=torch.float16)
        batch = make_batch(program.plan.global_batch)
        loss = float(program.step(batch))
        whole = program.full_gradients()
        program.zero_grad()
        program.step(batch, loss_scale=SMALL)
        lost = program.full_gradients()
        program.zero_grad()
        scaled_loss = float(program.step(batch, loss_scale=SCALE))
        finite = program.unscale_gradients(SCALE)
        kept = program.full_gradients()
        program.zero_grad()
        program.step(batch, loss_scale=2.0**40)
        too_large = program.unscale_gradients(2.0**40)
        found[name] = (loss, scaled_loss, whole, lost, kept, finite, too_large)
    return found


def one_rank_overflows() -> tuple[bool, bool]:
    """One element on one rank alone is infinite."""
    program = make_program({"mesh": Mesh(pp=2)})
    program.step(make_batch(program.plan.global_batch))
    good = program.unscale_gradients(1.0)
    if program.ranks.rank == 1:
        gradient = next(p.grad for _, p in program.named_parameters() if p.grad is not None)
        gradient.to_local().view(-1)[0] = float("inf")
    return good, program.unscale_gradients(1.0)


def trained_with_torchs_scaler(scale: float | None) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Parameters in float32 after one step and one that overflows; the scales that were used."""
    program = make_program({"mesh": Mesh(pp=2)}, dtype=torch.float32)
    batch = make_batch(program.plan.global_batch)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.5)
    if scale is None:
        program.step(batch)
        optimizer.step()
        return program.full_state_dict(), []
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    scaler.scale(torch.ones(()))
    scales = [scaler.get_scale()]
    for factor in (1.0, 2.0**120):
        program.zero_grad()
        program.step(batch, loss_scale=scaler.get_scale() * factor)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return program.full_state_dict(), scales


def on_rank() -> tuple[Any, ...]:
    trained = [trained_with_torchs_scaler(scale) for scale in (None, SCALE)]
    return scaled_steps(), one_rank_overflows(), trained


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return run_on_ranks(on_rank, 2, timeout_seconds=200)


@pytest.mark.parametrize("name", LAYOUTS)
def test_scaled_gradients_are_those_of_the_loss(ranks: list[Any], name: str) -> None:
    loss, scaled_loss, whole, lost, kept, finite, too_large = ranks[0][0][name]
    assert scaled_loss == pytest.approx(loss, rel=1e-6)
    assert finite and not too_large
    zeros = sum(int((g == 0).sum()) for g in lost.values())
    assert zeros > 4 * sum(int((g == 0).sum()) for g in whole.values())
    for key, value in whole.items():
        error = (kept[key].double() - value.double()).norm() / value.double().norm()
        assert error < 5e-3, (key, error)


def test_every_rank_hears_of_one_infinite_gradient(ranks: list[Any]) -> None:
    assert [found[1] for found in ranks] == [(True, False)] * 2


def test_torchs_scaler_serves_float32_parameters(ranks: list[Any]) -> None:
    """The step that overflows is skipped on both stages, and the scale halved."""
    (plain, _), (scaled, scales) = ranks[0][2]
    assert scales == [SCALE, SCALE, SCALE / 2] == ranks[1][2][1][1]
    for name, value in plain.items():
        torch.testing.assert_close(scaled[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_a_positive_number(scale: float) -> None:
    with pytest.raises(UsageError, match="loss_scale"):
        checked_scale(scale)
