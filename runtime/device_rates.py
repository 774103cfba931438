"""Measure what this rank's device reaches: products, attention, memory traffic, and launches.

Every measurement is a `Sample`: what was done, and the median seconds of a call. Sizes grow until
a call takes longer than the time one may have, so a slow device is measured with smaller ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.nn import functional as F

# Calls before the first one that counts: caches, clocks, the choice of a kernel.
_WARM = 2
_MOST_CALLS = 30


@dataclass(frozen=True, slots=True)
class Sample:
    """`work`: FLOPs done, or bytes moved; `seconds`: of one call. `what` tells samples apart:
    `matmul`, `attention forward`, `attention backward`, `memory`, `launch`; `dtype` as in
    `Device.flops`; `shape`: (m, n, k), or (heads, keys, head dim, causal), or (bytes,)."""

    what: str
    dtype: str
    shape: tuple[int, ...]
    work: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.work / self.seconds


@dataclass(frozen=True, slots=True)
class Effort:
    """How much to measure: the longest one call and one sample may take, and the largest size."""

    call_seconds: float
    sample_seconds: float
    largest: int


def time_call(call: Callable[[], object], device: torch.device, effort: Effort) -> float:
    """Median seconds of `call` on the device, warm; the device is idle before and after.

    A CPU is shared: there the seconds of this thread count, not those of others that ran meanwhile.
    """
    clock = time.thread_time if device.type == "cpu" else time.perf_counter
    for _ in range(_WARM):
        call()
    finish(device)
    times: list[float] = []
    begin = time.perf_counter()
    while len(times) < _MOST_CALLS:
        start = clock()
        call()
        finish(device)
        times.append(clock() - start)
        if time.perf_counter() - begin > effort.sample_seconds:
            break
    return statistics.median(times)


def launch_sample(device: torch.device) -> Sample:
    """Host seconds to issue one small op as training does (on a CPU: to run it): half of what an op
    and its backward take, in a graph whose Python is executed op by op. Graphs have about as many
    views as kernels, and prices count views with the kernels: each op has one here."""
    count = 100
    graph = fx.Graph()
    value = first = graph.placeholder("x")
    for _ in range(count):
        value = graph.call_function(torch.ops.aten.mul.Tensor, (value, first))
        value = graph.call_function(torch.ops.aten.view.default, (value, [8]))
    graph.output(value)
    module = fx.GraphModule({}, graph)
    x = torch.ones(8, device=device, requires_grad=True)
    times = []
    for _ in range(_WARM + 5):
        finish(device)
        begin = time.perf_counter()
        module(x).sum().backward()
        times.append(time.perf_counter() - begin)
    # The least: whatever interrupts the host is not the op's.
    return Sample("launch", "float32", (), 0.0, min(times) / (2 * count))


def memory_samples(device: torch.device, effort: Effort) -> Iterator[Sample]:
    """Scaling a tensor of growing size: every byte is read once and written once."""
    elements = 2**14
    while elements <= effort.largest**2 * 4:
        x, out = torch.ones(elements, device=device), torch.empty(elements, device=device)
        seconds = time_call(lambda x=x, out=out: torch.mul(x, 2.0, out=out), device, effort)  # type: ignore[misc]
        yield Sample("memory", "float32", (8 * elements,), 8.0 * elements, seconds)
        if seconds > effort.call_seconds:
            return
        elements *= 4


def matmul_samples(device: torch.device, dtype: torch.dtype, effort: Effort) -> Iterator[Sample]:
    """Square products, and thin ones as tensor parallelism makes them, of growing size."""
    size = 256
    while size <= effort.largest:
        slowest = 0.0
        for m, n, k in ((size, size, size), (size, size // 4, size), (size, size, size // 4)):
            a = torch.randn(m, k, device=device).to(dtype)
            b = torch.randn(k, n, device=device).to(dtype)
            seconds = time_call(lambda a=a, b=b: a @ b, device, effort)  # type: ignore[misc]
            slowest = max(slowest, seconds)
            yield Sample("matmul", _name(dtype), (m, n, k), 2.0 * m * n * k, seconds)
        if 8 * slowest > effort.call_seconds:
            return
        size *= 2


def attention_samples(device: torch.device, dtype: torch.dtype, effort: Effort) -> Iterator[Sample]:
    """Fused attention of growing length, forward and backward, whole and causal.

    FLOPs are those done: a causal one does half.
    """
    for head_dim in (64, 128):
        keys = 256
        while keys <= 4 * effort.largest:
            heads = max(1, 8 * effort.largest // keys)
            slowest = 0.0
            for causal in (False, True):
                forward, backward = _attention(
                    device, dtype, (heads, keys, head_dim), causal, effort
                )
                slowest = max(slowest, backward)
                work = 4.0 * heads * keys * keys * head_dim * (0.5 if causal else 1.0)
                shape = (heads, keys, head_dim, int(causal))
                yield Sample("attention forward", _name(dtype), shape, work, forward)
                yield Sample("attention backward", _name(dtype), shape, 2.5 * work, backward)
            if 8 * slowest > effort.call_seconds:
                break
            keys *= 4


def _attention(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    causal: bool,
    effort: Effort,
) -> tuple[float, float]:
    """Seconds of the forward and of the backward."""
    q, k, v = (torch.randn(1, *shape, device=device).to(dtype).requires_grad_() for _ in range(3))

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    with torch.no_grad():
        alone = time_call(forward, device, effort)
    result = forward()
    grad = torch.ones_like(result)

    def backward() -> object:
        return torch.autograd.grad(result, (q, k, v), grad, retain_graph=True)

    return alone, time_call(backward, device, effort)


def finish(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
