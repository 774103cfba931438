"""What is measured: the right work is done and counted, and slow devices stop early."""

from __future__ import annotations

import time

import pytest
import torch

from autopar.runtime.device_rates import (
    Effort,
    attention_samples,
    launch_sample,
    matmul_samples,
    memory_samples,
    time_call,
)

CPU = torch.device("cpu")
LITTLE = Effort(call_seconds=5.0, sample_seconds=0.01, largest=256)


def test_the_median_of_calls_is_timed() -> None:
    calls: list[float] = []

    def call() -> None:
        calls.append(1.0)
        # One slow call is no matter.
        end = time.thread_time() + (0.03 if len(calls) == 4 else 0.002)
        while time.thread_time() < end:
            pass
        time.sleep(0.005)  # what others do meanwhile does not count

    seconds = time_call(call, CPU, Effort(1.0, 5.0, 256))
    assert 0.002 <= seconds < 0.005 and len(calls) > 5


def test_products_of_every_shape_are_counted() -> None:
    found = list(matmul_samples(CPU, torch.float32, LITTLE))
    assert [s.shape for s in found] == [(256, 256, 256), (256, 64, 256), (256, 256, 64)]
    for sample in found:
        m, n, k = sample.shape
        assert sample.work == 2 * m * n * k and sample.rate == sample.work / sample.seconds
        assert (sample.what, sample.dtype) == ("matmul", "float32")


def test_sizes_grow_until_a_call_is_long() -> None:
    short = Effort(call_seconds=1e-9, sample_seconds=0.001, largest=1024)
    assert len(list(matmul_samples(CPU, torch.float32, short))) == 3
    assert len(list(memory_samples(CPU, short))) == 1
    more = list(memory_samples(CPU, LITTLE))
    assert [s.work for s in more] == [8 * 2**14, 8 * 2**16, 8 * 2**18]


def test_attention_counts_what_is_done() -> None:
    tiny = Effort(call_seconds=1e-9, sample_seconds=0.001, largest=64)
    found = {(s.what, *s.shape): s for s in attention_samples(CPU, torch.float32, tiny)}
    whole = found["attention forward", 2, 256, 64, 0]
    assert whole.work == 4 * 2 * 256 * 256 * 64
    assert found["attention forward", 2, 256, 64, 1].work == whole.work / 2
    assert found["attention backward", 2, 256, 64, 0].work == 2.5 * whole.work


def test_a_launch_is_short() -> None:
    assert 1e-8 < launch_sample(CPU).seconds < 1e-3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_waited_for() -> None:
    device = torch.device("cuda", 0)
    a = torch.randn(4096, 4096, device=device)
    assert 2 * 4096**3 / time_call(lambda: a @ a, device, LITTLE) < 200e12
