"""Ranks that do not fit together say so on every rank, within seconds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, PlanError
from autopar.mesh import Mesh
from autopar.runtime.ranks import Ranks, agree, together
from tests.warm_ranks import run_on_ranks


def message(function: Callable[[], object]) -> str:
    try:
        function()
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def hang() -> float:
    """Seconds until a collective that one rank does not reach fails."""
    ranks = Ranks.create(Mesh(tp=2), timeout_seconds=3)
    start = time.monotonic()
    if ranks.rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=ranks.group("tp"))
        except RuntimeError:
            return time.monotonic() - start
    time.sleep(5)
    return time.monotonic() - start


def meet() -> dict[str, str]:
    found = {"world": message(lambda: Ranks.create(Mesh(tp=4)))}
    ranks = Ranks.create(Mesh(pp=1, dp=2, tp=1))
    assert ranks.index("dp") == ranks.rank
    assert ranks.group("dp").size() == 2
    found["same"] = message(lambda: agree(ranks, "plan"))
    found["different"] = message(lambda: agree(ranks, f"plan of {ranks.rank}"))
    error = PlanError("my batch is odd") if ranks.rank == 1 else None
    found["together"] = message(lambda: together(ranks, error))
    found["amounts"] = str(together(ranks, None, (1.0, ranks.rank)))
    ranks.make_tied_groups([(0,), (0, 1)] if ranks.mesh.pp > 1 else [], lambda stage: stage)
    found["hang"] = str(hang())
    return found


def test_disagreement() -> None:
    first, second = run_on_ranks(meet, 2, timeout_seconds=60)
    for found in (first, second):
        assert "PlanError" in found["world"]
        assert "has 4 ranks, but 2 are running" in found["world"]
        assert found["same"] == "no error"
        assert "ranks [1] hold another plan or program than rank 0" in found["different"]
        assert found["amounts"] == "(2.0, 1.0)"
    assert "rank 1" in first["together"]
    assert "PlanError: my batch is odd" in first["together"]
    assert second["together"] == "PlanError: my batch is odd"
    assert 2 < float(first["hang"]) < 5


def test_one_rank_needs_no_launcher(one_rank: Ranks) -> None:
    assert "RANK" not in os.environ
    assert together(one_rank, None) == ()
    agree(one_rank, "anything")
