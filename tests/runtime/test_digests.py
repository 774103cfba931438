"""Digests differ where values or their order do, whatever the dtype, and cost no rank a hang."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.errors import RuntimeFault
from autopar.mesh import Mesh
from autopar.runtime.digests import BELOW, batch_digest, weights_digest
from autopar.runtime.ranks import Ranks, agree, batch_amounts, check_batches, together
from tests.warm_ranks import run_on_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64, torch.uint8])
def test_a_batch_in_another_order_is_another_batch(dtype: torch.dtype) -> None:
    rows = torch.arange(24).reshape(6, 4).remainder(5).gt(1).to(dtype)
    assert 0 <= batch_digest({"x": rows}) < BELOW
    assert batch_digest({"x": rows}) == batch_digest({"x": rows.clone()})
    assert batch_digest({"x": rows}) != batch_digest({"x": rows.flip(0)})
    changed = rows.clone()
    changed[3, 2] = 1 - changed[3, 2].to(torch.int64)
    assert batch_digest({"x": rows}) != batch_digest({"x": changed})


def test_inputs_that_change_places_are_another_batch() -> None:
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    assert batch_digest({"a": a, "b": b}) != batch_digest({"a": b, "b": a})
    assert batch_digest({"a": a, "b": b}) == batch_digest({"b": b, "a": a})
    assert batch_digest({}) == batch_digest({"none": torch.zeros(0, 4)}) == 0
    two, three = torch.tensor(2.0), torch.tensor(3.0)
    assert batch_digest({"number": three}) != batch_digest({"number": two})


def test_weights() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = weights_digest(model)
    assert before == weights_digest(model)
    with torch.no_grad():
        model[1].running_mean[2] = 1e-30
    assert before != weights_digest(model)
    assert weights_digest(model.to("meta")) == ""


def disagree() -> dict[str, str]:
    ranks = Ranks.create(Mesh(pp=1, dp=1, tp=2))
    torch.manual_seed(ranks.rank)
    model, rows = nn.Linear(4, 4), torch.randn(4, 4)
    found = {}
    try:
        agree(ranks, "plan", weights_digest(model))
    except RuntimeFault as error:
        found["weights"] = str(error)
    for name, batch in (("rows", rows), ("same", torch.ones(2, 2))):
        digest = batch_digest({"x": batch})
        sums = together(ranks, None, batch_amounts(ranks, digest))
        try:
            check_batches(ranks, digest, sums)
            found[name] = "no error"
        except RuntimeFault as error:
            found[name] = str(error)
    return found


def test_every_rank_is_told_which_differ() -> None:
    for found in run_on_ranks(disagree, 2, timeout_seconds=60):
        assert "ranks [1] hold other weights than rank 0" in found["weights"]
        assert "torch.manual_seed" in found["weights"]
        assert "ranks [1] have another batch than rank 0" in found["rows"]
        assert found["same"] == "no error"
