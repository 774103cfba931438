"""With dropout on: a seed repeats a run, recomputation repeats a step, the statistics are right."""

from __future__ import annotations

from statistics import mean, stdev
from typing import Any

import pytest
import torch

from tests.end_to_end.dropout import DRAWS, one_device_losses, ranks_of_a_planner
from tests.end_to_end.models import RATE
from tests.warm_ranks import run_planner

KEYS = ("pp1 dp2 tp2", "pp2 dp1 tp2")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_planner(ranks_of_a_planner)


@pytest.mark.parametrize("key", KEYS)
def test_a_seed_repeats_a_run(key: str, ranks: list[dict[str, Any]]) -> None:
    losses, gradients = ranks[0][f"{key} first"]
    again, same = ranks[0][f"{key} again"]
    other, _ = ranks[0][f"{key} other seed"]
    assert losses == again
    assert all(torch.equal(gradients[n], same[n]) for n in gradients)
    assert losses[0] != losses[1]
    assert losses != other
    assert all(found[f"{key} first"][0] == losses for found in ranks)


@pytest.mark.parametrize("key", KEYS)
def test_recomputation_draws_the_same_numbers(key: str, ranks: list[dict[str, Any]]) -> None:
    losses, gradients = ranks[0][f"{key} first"]
    for how in ("recomputed", "recomputed in part"):
        again, recomputed = ranks[0][f"{key} {how}"]
        assert again == pytest.approx(losses, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(recomputed[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("key", KEYS)
def test_training_statistics_match(key: str, ranks: list[dict[str, Any]]) -> None:
    """Mean and spread of the loss over many draws are one device's."""
    here, there = ranks[0][f"{key} losses"], one_device_losses(RATE, DRAWS)
    error = ((stdev(here) ** 2 + stdev(there) ** 2) / DRAWS) ** 0.5
    assert abs(mean(here) - mean(there)) < 4 * error
    assert 0.5 < stdev(here) / stdev(there) < 2


def test_values_that_are_whole_draw_alike_on_tp_ranks(ranks: list[dict[str, Any]]) -> None:
    """Else the gradients of what is whole on both would differ."""
    by_stage: dict[int, list[dict[str, torch.Tensor]]] = {}
    for found in ranks:
        by_stage.setdefault(found["place"]["pp"], []).append(found["whole"])
    for first, second in by_stage.values():
        assert first.keys() == second.keys() and first
        for name, gradient in first.items():
            torch.testing.assert_close(second[name], gradient, rtol=1e-5, atol=1e-7, msg=name)
