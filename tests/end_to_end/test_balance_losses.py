"""Losses of a whole batch on real gloo ranks against one device."""

from __future__ import annotations

import pytest

from tests.end_to_end.balance_losses import FORMS, errors
from tests.warm_ranks import run_on_ranks


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_form_equals_one_device(ranks: int) -> None:
    found = run_on_ranks(errors, ranks, (ranks,), timeout_seconds=200)[0]
    assert list(found) == list(FORMS)
    for name, (mesh, worst) in found.items():
        assert f"dp{ranks}" in mesh and worst < 1e-5, (name, mesh, worst)
