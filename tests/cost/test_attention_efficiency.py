from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.cluster import Cluster, Device
from autopar.cost.attention_efficiency import attention_efficiency, attention_seconds

A100 = Cluster.parse("a100-80:1x8").device
H100 = Cluster.parse("h100:1x8").device


def seconds(device: Device, flops: float = 1e13, **changes: Any) -> float:
    shape: dict[str, Any] = dict(
        heads=256, queries=4096, keys=4096, head_dim=128, causal=False, backward=False
    )
    return attention_seconds(flops, **shape | changes, dtype="bfloat16", device=device)


# TFLOP/s of FlashAttention-2, forward+backward, causal (operations counted at half), head dim 128,
# for 512, 1024, 2048, 4096, 8192, 16384 keys.
# Source: benchmark figures of github.com/Dao-AILab/flash-attention.
FLASH2 = {"a100": (99, 133, 155, 173, 182, 189), "h100": (163, 221, 265, 294, 308, 328)}


@pytest.mark.parametrize("name", ["a100", "h100"])
def test_rates_of_measured_attention(name: str) -> None:
    device = {"a100": A100, "h100": H100}[name]
    for keys, rate in zip((512, 1024, 2048, 4096, 8192, 16384), FLASH2[name], strict=True):
        shape = dict(queries=keys, keys=keys, causal=True, heads=2**24 // keys)
        total = seconds(device, 1e13, **shape) + seconds(device, 2.5e13, **shape, backward=True)
        assert 3.5e13 / total / 1e12 == pytest.approx(rate, rel=0.06)


def test_kernel_generations_differ() -> None:
    times = [seconds(replace(H100, attention_kernel=k)) for k in ("flash2", "cudnn", "flash3")]
    assert times == sorted(times, reverse=True) and times[0] > 1.6 * times[-1]


def test_small_heads_and_few_keys_are_slow() -> None:
    assert seconds(H100, head_dim=64) > 1.1 * seconds(H100, head_dim=128)
    assert seconds(H100, head_dim=32) == pytest.approx(2 * seconds(H100, head_dim=64))
    middle = seconds(H100, head_dim=96)
    assert seconds(H100, head_dim=128) < middle < seconds(H100, head_dim=64)
    assert seconds(H100, head_dim=256) == seconds(H100, head_dim=128)
    assert seconds(H100, keys=128) > 1.5 * seconds(H100)
    assert seconds(H100, causal=True) > seconds(H100)


def test_idle_processors() -> None:
    # 66 blocks of 128 queries on 132 processors.
    assert seconds(H100, heads=66, queries=128) == pytest.approx(2 * seconds(H100))


def test_without_a_kernel_it_is_a_matmul() -> None:
    plain = replace(H100, attention_kernel="")
    assert seconds(plain) == pytest.approx(1e13 / (989e12 * plain.matmul_efficiency))


def test_efficiency_is_a_fraction() -> None:
    for device in (A100, H100, Cluster.parse("b200:1x8").device):
        for kernel in device.attention.values():
            for dim in (16, 64, 80, 128, 512):
                for causal in (True, False):
                    whole = attention_efficiency(kernel, 10**6, dim, causal=causal, backward=False)
                    assert 0 < whole < 0.85
