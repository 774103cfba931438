"""Ranks give results, and every way to fail ends all of them soon with one clear error."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from autopar.errors import PlanError, RuntimeFault
from autopar.runtime.launch import run_script, spawn


def sum_of_ranks(offset: int) -> tuple[torch.Tensor, str]:
    value = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(value)
    return value, os.environ["OMP_NUM_THREADS"]


def fail_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        raise ValueError("this rank does not like its work")
    dist.barrier()


def die_on_last() -> None:
    if dist.get_rank() == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def never_meet() -> None:
    if dist.get_rank() == 0:
        time.sleep(60)


def test_results_in_order_of_rank() -> None:
    results = spawn(sum_of_ranks, 2, (10,))
    assert [(int(v), threads) for v, threads in results] == [(21, "1"), (21, "1")]


def test_error_of_a_rank_comes_with_its_traceback() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeFault, match="rank 1 failed") as caught:
        spawn(fail_on_last, 2)
    assert "ValueError: this rank does not like its work" in str(caught.value)
    assert time.monotonic() - start < 30


def test_dead_rank_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeFault, match="rank 1 died: signal SIGKILL"):
        spawn(die_on_last, 2)
    assert time.monotonic() - start < 30


def test_whole_timeout() -> None:
    start = time.monotonic()
    with pytest.raises(RuntimeFault, match="gave no result in 6 s"):
        spawn(never_meet, 2, timeout_seconds=6)
    assert time.monotonic() - start < 20


def test_run_script_gives_the_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, autopar.runtime\n"
        "assert os.environ['WORLD_SIZE'] == '2' and sys.argv[1:] == ['--flag', '3']\n"
    )
    assert run_script(2, str(script), ["--flag", "3"]) == 0
    script.write_text("raise SystemExit(3)")
    assert run_script(1, str(script)) != 0


def refuse() -> None:
    raise PlanError("this plan is not for these ranks", next_step="use another one")


def test_an_error_that_says_what_to_do_is_that_of_the_caller() -> None:
    with pytest.raises(PlanError, match="not for these ranks") as caught:
        spawn(refuse, 2, timeout_seconds=60)
    assert caught.value.next_step == "use another one"
    assert "Traceback" in str(caught.value.__cause__)
