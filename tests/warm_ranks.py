"""Ranks and planners for tests: real processes, forked from a server that has everything imported.

A spawned rank imports torch and transformers for itself, some seconds of it. The server of
`multiprocessing` imports them once for all ranks of a test process, and has no threads.
"""

from __future__ import annotations

import multiprocessing
import pickle
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from autopar.errors import RuntimeFault
from autopar.runtime.launch import spawn

_PRELOAD = ["tests.warm_imports"]


def run_on_ranks(
    function: Callable[..., Any],
    nproc: int,
    args: Sequence[Any] = (),
    timeout_seconds: float = 120.0,
) -> list[Any]:
    """`autopar.runtime.launch.spawn` with ranks that start warm."""
    multiprocessing.set_forkserver_preload(_PRELOAD)
    return spawn(function, nproc, args, timeout_seconds=timeout_seconds, start="forkserver")


def run_on_forks(
    function: Callable[..., Any],
    nproc: int,
    args: Sequence[Any] = (),
    timeout_seconds: float = 120.0,
) -> list[Any]:
    """The same with ranks that inherit `args`, such as a captured program. For a planner."""
    return spawn(function, nproc, args, timeout_seconds=timeout_seconds, start="fork")


def run_planner(function: Callable[..., Any], *args: Any, timeout_seconds: float = 240.0) -> Any:
    """`function(*args)` in one warm process, which may fork ranks: a test process has threads.

    Raises `RuntimeFault` with the traceback, or when it dies or is not done in time.
    """
    multiprocessing.set_forkserver_preload(_PRELOAD)
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_plan, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout_seconds):
            raise RuntimeFault(f"{function.__name__} gave no result in {timeout_seconds:g} s")
        good, value = pickle.loads(receiver.recv_bytes())
    except EOFError:
        process.join(timeout=5.0)
        raise RuntimeFault(f"{function.__name__} died: exit code {process.exitcode}") from None
    finally:
        process.join(timeout=5.0)
        if process.is_alive():
            process.kill()
            process.join()
    if not good:
        raise RuntimeFault(f"{function.__name__} failed\n{value}")
    return value


def _plan(sender: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        message = (True, function(*args))
    except BaseException:
        message = (False, traceback.format_exc())
    # Not `send`: torch would pass tensors through memory that ends with this process.
    sender.send_bytes(pickle.dumps(message))
