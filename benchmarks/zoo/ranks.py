"""Forked ranks: they inherit the captured program, so that it is captured once, not per rank."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist


def fork(function: Callable[..., Any], ranks: int, arguments: Any, timeout_seconds: float) -> Any:
    """`function(*arguments)` on forked gloo ranks; what rank 0 returned.

    Only for a process without threads of its own (`torch.set_num_threads(1)`). Raises
    `RuntimeError` when a rank fails or `timeout_seconds` run out; all ranks have ended then.
    """
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True
    )
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(
            target=_main,
            args=(rank, ranks, store.port, function, arguments, sender, timeout_seconds),
        )
        for rank in range(ranks)
    ]
    try:
        for process in processes:
            process.start()
        return _receive(receiver, processes, timeout_seconds)
    finally:
        for process in processes:
            process.join(timeout=1.0)
            if process.is_alive():
                process.kill()
                process.join()


def _receive(receiver: Connection, processes: list[Any], timeout_seconds: float) -> Any:
    deadline = time.monotonic() + timeout_seconds
    while time.monotonic() < deadline:
        if receiver.poll(0.2):
            good, value = receiver.recv()
            if not good:
                raise RuntimeError(value)
            return value
        dead = [p.exitcode for p in processes if p.exitcode]
        if dead:
            raise RuntimeError(f"a rank ended with exit code {dead[0]}")
    raise RuntimeError(f"no result in {timeout_seconds:g} s")


def _main(
    rank: int,
    ranks: int,
    port: int,
    function: Callable[..., Any],
    arguments: Any,
    sender: Connection,
    timeout_seconds: float,
) -> None:
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        # The parent holds the store.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_seconds))
        result = function(*arguments)
        if rank == 0:
            sender.send((True, result))
        dist.barrier()
    except BaseException:
        sender.send((False, traceback.format_exc()))
    # Not through the parent's exit handlers, of which this is a copy.
    os._exit(0)
