"""`autopar.compile` in a training loop: DeviceMesh, clipping, momentum, tied weights."""

from __future__ import annotations

import pytest

from tests.end_to_end.training import (
    adafactor_on_one_device,
    adafactor_on_ranks,
    error_of,
    on_a_device_mesh,
    one_device,
)
from tests.warm_ranks import run_on_ranks


@pytest.mark.parametrize(
    ("names", "told"),
    [(("pp", "tp"), "pp2 dp1 tp2"), (("dp_replicate", "dp_shard"), "pp1 dp4 tp1 shard2")],
)
def test_a_training_loop_on_a_device_mesh_equals_one_device(
    names: tuple[str, ...], told: str
) -> None:
    """GPT-2's embedding is tied across the two stages; clipping needs the norm over both."""
    results = run_on_ranks(on_a_device_mesh, 4, ((2, 2), names), timeout_seconds=200)
    losses, norms = one_device()
    for mesh, (found_losses, found_norms) in results:
        assert mesh == told
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert found_norms == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize(
    "pins", ["dp=2,tp=2,zero=3,weights=split", "pp=2,cp=2,zero=1", "dp=4,shard=2,zero=3"]
)
def test_adafactor_of_shards_and_pieces_equals_one_device(pins: str) -> None:
    """GPT-2's attention weights are held in pieces; its state continues in another program."""
    expected = adafactor_on_one_device()
    for losses, names, last in run_on_ranks(adafactor_on_ranks, 4, (pins,), timeout_seconds=200):
        assert [*losses, *last] == pytest.approx(expected, rel=1e-4)
        assert any(n.endswith("c_attn.weight[:, 0:32].row_var") for n in names)


def test_a_mesh_with_unknown_dims_is_refused_on_every_rank() -> None:
    errors = run_on_ranks(error_of, 2, (None, ("x",)), timeout_seconds=100)
    assert all(e.startswith("UsageError") and "pp, dp, cp and tp" in e for e in errors)


def test_a_cluster_of_another_size_is_refused_on_every_rank() -> None:
    errors = run_on_ranks(error_of, 2, ("cpu:4", ()), timeout_seconds=100)
    assert all(e.startswith("PlanError") and "torchrun started 2" in e for e in errors)
