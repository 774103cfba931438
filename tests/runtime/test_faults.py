"""A rank that dies, fails or stays away: every other one says so in autopar's words, soon."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from autopar.errors import UsageError
from autopar.runtime.faults import Faults
from autopar.runtime.ranks import Ranks
from tests.runtime.failing_rank import WAIT_SECONDS

ROOT = Path(__file__).resolve().parents[2]


def outcomes(how: str, mesh: str, world: int, folder: Path) -> dict[int, tuple[float, list[str]]]:
    """What the steps of every rank that lived came to; each rank is a process of its own."""
    store_type: Any = dist.TCPStore
    store = store_type("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = []
    for rank in range(world):
        environment = {
            **os.environ,
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.runtime.failing_rank"]
        command += [how, mesh, str(folder / f"{rank}.txt")]
        processes.append(subprocess.Popen(command, env=environment, cwd=ROOT))
    try:
        for process in processes[:-1] if how == "stays away" else processes:
            process.wait(timeout=120)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = {}
    for rank in range(world):
        path = folder / f"{rank}.txt"
        if path.exists():
            seconds, _, rest = path.read_text().partition("\n")
            found[rank] = (float(seconds), rest.split("\n====\n"))
    return found


@pytest.mark.parametrize(
    ("mesh", "world"), [("dp=2,tp=2", 4), pytest.param("pp=2", 2, marks=pytest.mark.slow)]
)
def test_a_rank_dies_between_steps(mesh: str, world: int, tmp_path: Path) -> None:
    found = outcomes("dies", mesh, world, tmp_path)
    assert set(found) == set(range(world - 1))
    for rank, (seconds, (first, second)) in found.items():
        assert first.startswith("RuntimeFault: another rank died or does not answer"), first
        assert f"rank {rank}, in step 2" in first and "found its connection closed" in first
        assert "gloo" not in first
        assert second.startswith("RuntimeFault: step 2 can't run: this program failed"), second
        assert seconds < WAIT_SECONDS
    # The dead one left no word.
    assert any(f"{world - 1}], which left no word" in first for _, (first, _) in found.values())


@pytest.mark.parametrize("mesh", [pytest.param("dp=2", marks=pytest.mark.slow), "pp=2"])
def test_a_rank_fails_inside_its_step(mesh: str, tmp_path: Path) -> None:
    found = outcomes("fails", mesh, 2, tmp_path)
    (_, (own, again)), (seconds, (first, _)) = found[1], found[0]
    assert own.startswith(("IndexError", "RuntimeError")), own
    assert again.startswith("RuntimeFault: step 2 can't run: this program failed before"), again
    assert first.startswith("RuntimeFault: rank 1 failed in step 2, forward and backward"), first
    assert own.splitlines()[0].split(": ", 1)[1][:40] in first
    assert seconds < WAIT_SECONDS


def test_a_rank_that_stays_away_is_waited_for_no_longer_than_told(tmp_path: Path) -> None:
    seconds, (first, _) = outcomes("stays away", "dp=2", 2, tmp_path)[0]
    assert "waited in vain" in first and "ranks [1], which left no word" in first
    assert "step 2, checking the batch (all_reduce)" in first
    assert WAIT_SECONDS - 1 < seconds < WAIT_SECONDS + 15


def test_one_rank_alone_goes_on_after_an_error(one_rank: Ranks) -> None:
    faults = Faults(one_rank)
    for _ in range(2):
        with pytest.raises(ValueError, match="odd"), faults.during("step 0"):
            raise ValueError("odd")
    with pytest.raises(UsageError, match="mine"), faults.during("step 0"):
        raise UsageError("mine")


def test_what_a_pipeline_wraps_is_seen(one_rank: Ranks) -> None:
    from autopar.runtime.faults import _loss

    wrapped = RuntimeError("stage 0 failed to run forward")
    wrapped.__cause__ = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:1")
    assert _loss(wrapped) == "found its connection closed"
    assert _loss(RuntimeError("Timed out waiting 3000ms for recv operation")) == "waited in vain"
    assert _loss(ValueError("connection closed")) is None and _loss(RuntimeError("odd")) is None
