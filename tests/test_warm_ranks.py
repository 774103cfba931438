"""Ranks and planners that start warm fail like those that don't, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from autopar.errors import RuntimeFault
from tests.warm_ranks import run_on_forks, run_on_ranks, run_planner


def rank() -> torch.Tensor:
    return torch.tensor([dist.get_rank()])


def fail_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("broken on purpose")
    dist.barrier()


def planner(function: object) -> list[torch.Tensor]:
    assert callable(function)
    return run_on_forks(function, 2, timeout_seconds=30)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(60)


def test_a_failing_rank_is_named_and_the_next_run_is_good() -> None:
    for run in (lambda f: run_on_ranks(f, 2), lambda f: run_planner(planner, f)):
        with pytest.raises(RuntimeFault, match="ValueError: broken on purpose"):
            run(fail_on_last)
        assert [int(r) for r in run(rank)] == [0, 1]


def test_a_planner_that_dies_or_hangs_is_an_error() -> None:
    with pytest.raises(RuntimeFault, match="die died: exit code -9"):
        run_planner(die)
    with pytest.raises(RuntimeFault, match="hang gave no result in 1 s"):
        run_planner(hang, timeout_seconds=1)
