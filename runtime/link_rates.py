"""Measure collectives over the levels of the ranks that torchrun started.

Every rank calls `collective_samples` with the same arguments: all groups of a level run at once,
as the groups of a mesh axis do. A collective that the backend lacks is left out, on all ranks.

On a CPU a collective in a loop by itself says little about one in a training step: there ranks
arrive at different times, and the threads that carry the message sleep while the same cores
compute. So there every call comes after some compute, and what it adds to that counts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from autopar.runtime.ranks import Ranks

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
# torch 2.13 gave the collectives of one tensor new names.
_gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_scatter: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_WARM = 2
_MOST_CALLS = 20
# On a CPU: compute before each call, about what a training step does between two collectives; calls
# in a row, so that ranks drift apart as they do there; and how often they are repeated.
_WORK_SECONDS = 4e-3
_CALLS_IN_A_ROW = 4
_LEAST_REPEATS, _MOST_REPEATS = 3, 9


@dataclass(frozen=True, slots=True)
class LinkSample:
    """`nbytes` as `collective_time` counts them; `seconds`: of one call on the slowest rank."""

    kind: str
    group: int
    stride: int
    nbytes: int
    seconds: float


def level_groups(ranks: Ranks, group: int, stride: int) -> dist.ProcessGroup:
    """This rank's group of `group` ranks spaced by `stride`; blocks of groups tile the ranks."""
    world = dist.get_world_size()
    own: dist.ProcessGroup | None = None
    for block in range(0, world, group * stride):
        for first in range(block, block + stride):
            members = list(range(first, first + group * stride, stride))
            made = dist.new_group(members, timeout=ranks.wait)
            if ranks.rank in members:
                own = made
    assert own is not None
    return own


def collective_samples(
    ranks: Ranks, group: int, stride: int, sizes: tuple[int, ...], seconds: float
) -> Iterator[LinkSample]:
    """Every kind at every size (bytes, multiples of 4 * group), up to `seconds` for each sample."""
    process_group = level_groups(ranks, group, stride)
    for kind in KINDS:
        for nbytes in sizes:
            call = _call(kind, nbytes, group, stride, ranks, process_group)
            found = timed_call(call, ranks, process_group, seconds)
            if found is None:
                break
            yield LinkSample(kind, group, stride, nbytes, found)


def _call(
    kind: str, nbytes: int, group: int, stride: int, ranks: Ranks, own: dist.ProcessGroup
) -> Callable[[], object]:
    device = ranks.device
    whole = torch.ones(nbytes // 4, device=device)
    part = torch.ones(nbytes // 4 // group, device=device)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=own)
    if kind == "all_gather":
        return lambda: _gather(whole, part, group=own)
    if kind == "reduce_scatter":
        return lambda: _scatter(part, whole, group=own)
    if kind == "all_to_all":
        other = torch.empty_like(part)
        return lambda: dist.all_to_all_single(other, part, group=own)
    return lambda: _pass_on(whole, group, own)


def _pass_on(message: torch.Tensor, group: int, own: dist.ProcessGroup) -> None:
    """Every rank sends to the next one and receives from the one before, as pipelines do."""
    place = dist.get_rank(own)
    received = torch.empty_like(message)
    after = dist.get_global_rank(own, (place + 1) % group)
    before = dist.get_global_rank(own, (place - 1) % group)
    for work in (
        dist.isend(message, after, group=own),
        dist.irecv(received, before, group=own),
    ):
        if work is not None:
            work.wait()


def measured_slowdown(ranks: Ranks, rounds: int = 12) -> float:
    """Seconds that products get longer per second of an all-reduce behind them, from 0 to 1; the
    same on all ranks.

    1 means that hiding gains nothing: on a CPU the reduction runs on the same cores. Each of the
    three times is the least of `rounds`, as what else runs can only add to it.
    """
    device = ranks.device
    size = 256 if device.type == "cpu" else 4096
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    gradients = torch.ones(2**20 if device.type == "cpu" else 2**26, device=device)

    def compute() -> None:
        for _ in range(20):
            torch.mm(a, b)

    def reduce() -> Any:
        return dist.all_reduce(gradients, async_op=True)

    def both() -> None:
        work = reduce()
        compute()
        work.wait()

    calls: tuple[Callable[[], object], ...] = (compute, lambda: reduce().wait(), both)
    least = [float("inf")] * len(calls)
    for _ in range(_WARM + rounds):
        gradients.fill_(1.0)
        for i, call in enumerate(calls):
            dist.barrier(group=ranks.control)
            begin = time.perf_counter()
            _once(call, ranks)
            least[i] = min(least[i], _slowest(time.perf_counter() - begin, ranks))
    alone, reduced, together = least
    hidden = min(alone, reduced)
    return min(1.0, max(0.0, (together - max(alone, reduced)) / hidden))


def timed_call(
    call: Callable[[], object], ranks: Ranks, own: dist.ProcessGroup, budget: float
) -> float | None:
    """Seconds of a call on the slowest rank: the median, on a CPU of what it adds to compute; None
    when the backend can't do it. Ranks agree on how often."""
    try:
        for _ in range(_WARM):
            call()
    except (RuntimeError, NotImplementedError):
        return None
    begin = time.perf_counter()
    _once(call, ranks)
    one = _slowest(time.perf_counter() - begin, ranks)
    if ranks.device.type == "cpu":
        return _added(call, ranks, one, budget)
    count = max(3, min(_MOST_CALLS, int(budget / max(one, 1e-9))))
    times = []
    for _ in range(count):
        dist.barrier(group=ranks.control)
        begin = time.perf_counter()
        _once(call, ranks)
        times.append(time.perf_counter() - begin)
    return _slowest(statistics.median(times), ranks)


def _added(call: Callable[[], object], ranks: Ranks, one: float, budget: float) -> float:
    """Seconds that a call of about `one` second adds to the compute before it."""
    work = _compute(_WORK_SECONDS)

    def both() -> None:
        work()
        call()

    each = _CALLS_IN_A_ROW * (one + 2 * _WORK_SECONDS)
    repeats = max(_LEAST_REPEATS, min(_MOST_REPEATS, int(budget / each)))
    alone: list[float] = []
    together: list[float] = []
    for _ in range(int(_slowest(repeats, ranks))):
        for run, times in ((work, alone), (both, together)):
            dist.barrier(group=ranks.control)
            begin = time.perf_counter()
            for _ in range(_CALLS_IN_A_ROW):
                run()
            times.append((time.perf_counter() - begin) / _CALLS_IN_A_ROW)
    # Compute that another process interrupted is no measure of compute.
    return _slowest(max(1e-7, statistics.median(together) - min(alone)), ranks)


def _compute(seconds: float) -> Callable[[], object]:
    """Products on the CPU that take about so long."""
    a = torch.randn(256, 256)
    begin = time.thread_time()
    for _ in range(20):
        torch.mm(a, a)
    count = max(1, round(seconds * 20 / max(time.thread_time() - begin, 1e-9)))

    def run() -> None:
        for _ in range(count):
            torch.mm(a, a)

    return run


def _once(call: Callable[[], object], ranks: Ranks) -> None:
    call()
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)


def _slowest(seconds: float, ranks: Ranks) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=ranks.control)
    return float(value)
