"""`autopar.compile` in a training loop: DeviceMesh, clipping, momentum, tied weights."""

from __future__ import annotations

import pytest

from tests.end_to_end.training import error_of, on_a_device_mesh, one_device
from tests.warm_ranks import run_on_ranks


def test_a_training_loop_on_a_device_mesh_equals_one_device() -> None:
    """GPT-2's embedding is tied across the two stages; clipping needs the norm over both."""
    results = run_on_ranks(on_a_device_mesh, 4, ((2, 2), ("pp", "tp")), timeout_seconds=200)
    losses, norms = one_device()
    for mesh, (found_losses, found_norms) in results:
        assert mesh == "pp2 dp1 tp2"
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-5)


def test_a_mesh_with_unknown_dims_is_refused_on_every_rank() -> None:
    errors = run_on_ranks(error_of, 2, (None, ("x",)), timeout_seconds=100)
    assert all(e.startswith("UsageError") and "pp, dp, cp and tp" in e for e in errors)


def test_a_cluster_of_another_size_is_refused_on_every_rank() -> None:
    errors = run_on_ranks(error_of, 2, ("cpu:4", ()), timeout_seconds=100)
    assert all(e.startswith("PlanError") and "torchrun started 2" in e for e in errors)
