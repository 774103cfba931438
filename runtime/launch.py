"""Start local ranks: a function on each (`spawn`), or a script under torchrun (`run_script`)."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, RuntimeFault

# How long to look for the cause after the first sign of trouble: a rank that lost its peer
# often reports before the peer's death is seen.
_GRACE_SECONDS = 1.0
_TERMINATE_SECONDS = 2.0


def spawn(
    function: Callable[..., Any],
    nproc: int,
    args: Sequence[Any] = (),
    timeout_seconds: float = 120.0,
    backend: str = "gloo",
    start: str = "spawn",
) -> list[Any]:
    """Run `function(*args)` on `nproc` local ranks; return the results in order of rank.

    The function has to be importable or defined in the main script (which then needs the
    `if __name__ == "__main__"` guard); it runs with the torchrun variables set and the process
    group made. Results travel by pickle. `start`: how `multiprocessing` starts a rank; "fork" and
    "forkserver" save the imports, from a process without threads and CUDA only. Raises
    `RuntimeFault` when a rank raises (with its traceback), dies, or `timeout_seconds` run out; no
    rank outlives the call.
    """
    import torch.distributed

    # Any: torch does not list its stores among what it exports.
    torch_distributed: Any = torch.distributed
    # This process holds the store, so that its port is taken from the moment it is known.
    store = torch_distributed.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=True
    )
    # Any: the contexts have no common type with `Process`.
    context: Any = multiprocessing.get_context(start)
    processes: list[Any] = []
    pipes: list[connection.Connection] = []
    try:
        for rank in range(nproc):
            receiver, sender = context.Pipe(duplex=False)
            variables = _rank_variables(rank, nproc, store.port)
            process = context.Process(
                target=_rank_main,
                args=(sender, variables, function, tuple(args), backend, timeout_seconds),
            )
            with _environment(variables):
                process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        return _collect(processes, pipes, timeout_seconds)
    finally:
        _end(processes)


def run_script(nproc: int, script: str, args: Sequence[str] = ()) -> int:
    """Run a script on `nproc` local ranks under torchrun; returns its exit code."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    # A bare checkout is importable from its own folder only; the script may live elsewhere.
    root = str(Path(__file__).resolve().parent.parent)
    path = [root, *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(nproc), script, *args]
    return subprocess.run(command, env=environment, check=False).returncode


def _rank_variables(rank: int, nproc: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # As under torchrun: ranks are clients of the store that the parent holds.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for a process that starts inside; it reads them before it imports anything."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@dataclass(frozen=True)
class _Fault:
    """How a rank failed: its traceback, or how it died; and its error, if it is one that says what
    is wrong."""

    text: str
    error: AutoparError | None = None
    died: bool = False


def _rank_main(
    sender: connection.Connection,
    variables: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    backend: str,
    timeout_seconds: float,
) -> None:
    import torch.distributed as dist

    # A fork server hands down its own environment, not that of the process that asked.
    os.environ.update(variables)
    try:
        wait = datetime.timedelta(seconds=timeout_seconds)
        dist.init_process_group(backend, timeout=wait)
        result = function(*args)
        _send(sender, True, result)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        told = error if isinstance(error, AutoparError) else None
        _send(sender, False, _Fault(traceback.format_exc(), told))
        sys.stdout.flush()
        # Others may wait for this rank for ever; leave without asking them.
        os._exit(1)


def _send(sender: connection.Connection, good: bool, value: Any) -> None:
    # Not `sender.send`: torch would pass tensors through memory that ends with this process.
    sender.send_bytes(pickle.dumps((good, value)))


def _collect(
    processes: list[Any], pipes: list[connection.Connection], timeout_seconds: float
) -> list[Any]:
    deadline = time.monotonic() + timeout_seconds
    results: dict[int, Any] = {}
    faults: dict[int, _Fault] = {}
    while len(results) < len(processes):
        left = deadline - time.monotonic()
        if left <= 0:
            missing = sorted(set(range(len(processes))) - set(results) - set(faults))
            if faults:
                break
            raise RuntimeFault(
                f"rank {missing} of {len(processes)} gave no result in {timeout_seconds:g} s",
                next_step="look for a collective that not all ranks reach, or allow more time",
            )
        open_ranks = [r for r in range(len(processes)) if r not in results and r not in faults]
        waiting = {pipes[r]: r for r in open_ranks} | {processes[r].sentinel: r for r in open_ranks}
        for item in connection.wait(list(waiting), timeout=min(left, 1.0)):
            _receive(waiting[item], processes, pipes, results, faults)
        if faults and deadline > time.monotonic() + _GRACE_SECONDS:
            deadline = time.monotonic() + _GRACE_SECONDS
        if faults and len(results) + len(faults) == len(processes):
            break
    if faults:
        _raise_first(faults)
    return [results[rank] for rank in range(len(processes))]


def _receive(
    rank: int,
    processes: list[Any],
    pipes: list[connection.Connection],
    results: dict[int, Any],
    faults: dict[int, _Fault],
) -> None:
    if rank in results or rank in faults:
        return
    try:
        if pipes[rank].poll():
            good, value = pickle.loads(pipes[rank].recv_bytes())
            (results if good else faults)[rank] = value
            return
    except EOFError:
        pass
    processes[rank].join(timeout=_TERMINATE_SECONDS)
    code = processes[rank].exitcode
    name = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
    faults[rank] = _Fault(f"died: {name}", died=True)


def _raise_first(faults: dict[int, _Fault]) -> None:
    """The likeliest cause: a death without a word, else the error that came first."""
    died = [rank for rank, fault in faults.items() if fault.died]
    rank = died[0] if died else next(iter(faults))
    text, error = faults[rank].text, faults[rank].error
    if died:
        raise RuntimeFault(
            f"rank {rank} {text}; the other ranks were ended",
            next_step=(
                "the system is often out of memory then: free some, or start fewer ranks"
                if text.endswith("SIGKILL")
                else "look at what that rank printed last; PYTHONFAULTHANDLER=1 shows where it was"
            ),
        )
    fault = RuntimeFault(f"rank {rank} failed; the other ranks were ended\n{text.rstrip()}")
    if error is not None and not isinstance(error, RuntimeFault):
        raise error from fault
    raise fault


def _end(processes: list[Any]) -> None:
    for process in processes:
        if process.is_alive() and process.exitcode is None:
            process.join(timeout=0.0)
    alive = [p for p in processes if p.is_alive()]
    deadline = time.monotonic() + _TERMINATE_SECONDS
    for process in alive:
        process.join(timeout=max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.terminate()
    for process in alive:
        process.join(timeout=_TERMINATE_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()
