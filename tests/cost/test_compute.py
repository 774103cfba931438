from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.cost.compute import matmul_efficiency, op_time

H100 = Cluster.parse("h100:1x8").device
A100 = Cluster.parse("a100-80:1x8").device


def test_the_roofline_says_what_an_op_is_bound_by() -> None:
    def bound(flops: float, bytes_moved: float, is_matmul: bool) -> str:
        return op_time(
            flops=flops, bytes_moved=bytes_moved, dtype="bfloat16", device=H100, is_matmul=is_matmul
        ).bound

    assert bound(1e13, 1e8, True) == "compute"
    assert bound(1e9, 1e10, False) == "memory"
    assert bound(0, 1e10, False) == "memory"
    assert bound(1e3, 1e3, False) == "launch"


def test_seconds_are_those_of_the_formula() -> None:
    common = dict(dtype="bfloat16", device=H100, is_matmul=True)
    large = op_time(flops=1e13, bytes_moved=0, **common)  # type: ignore[arg-type]
    assert large.seconds == pytest.approx(1e13 / (989e12 * H100.matmul_efficiency))
    copy = op_time(flops=0, bytes_moved=1e10, **common)  # type: ignore[arg-type]
    assert copy.seconds == pytest.approx(1e10 / (3.35e12 * H100.memory_efficiency))
    none = op_time(flops=0, bytes_moved=0, **common)  # type: ignore[arg-type]
    assert none.seconds == H100.launch_seconds


def test_only_matmuls_use_the_matrix_units() -> None:
    common = dict(flops=1e13, bytes_moved=0, device=H100)
    plain = op_time(dtype="bfloat16", is_matmul=False, **common)  # type: ignore[arg-type]
    assert plain.seconds == pytest.approx(1e13 / 67e12)
    whole = op_time(dtype="int64", is_matmul=True, **common)  # type: ignore[arg-type]
    assert whole.seconds == pytest.approx(1e13 / (67e12 * H100.matmul_efficiency))


def test_efficiency_grows_with_every_size_and_saturates() -> None:
    peak = H100.flops["bfloat16"]
    for axis in range(3):
        shape, last = [4096, 4096, 4096], 0.0
        for size in (1, 64, 512, 4096, 32768):
            shape[axis] = size
            value = matmul_efficiency((shape[0], shape[1], shape[2]), peak, H100)
            assert last < value < H100.matmul_efficiency
            last = value
    assert matmul_efficiency((10**6, 10**6, 10**6), peak, H100) == pytest.approx(0.803, rel=1e-2)


def test_four_halves_of_k_cost_more_than_the_whole() -> None:
    def seconds(k: int) -> float:
        size = 2 * 4096 * 4096 * k
        return op_time(
            flops=size,
            bytes_moved=0,
            dtype="bfloat16",
            device=H100,
            is_matmul=True,
            matmul_shape=(4096, 4096, k),
        ).seconds

    assert seconds(2048) > 1.05 * seconds(8192) / 4


# (groups, m, n, k, TFLOP/s), FP8 with bfloat16 output on H800 (the matrix units of an H100).
# Source: DeepGEMM README, github.com/deepseek-ai/DeepGEMM, commit a6d97a1c1b, lines 19-56.
DEEPGEMM = [
    (1, 64, 24576, 1536, 289),
    (1, 64, 7168, 16384, 336),
    (1, 128, 32768, 512, 358),
    (1, 128, 4096, 7168, 533),
    (1, 4096, 2112, 7168, 1058),
    (1, 4096, 24576, 1536, 990),
    (1, 4096, 32768, 512, 590),
    (1, 4096, 7168, 16384, 1358),
    (1, 4096, 7168, 2048, 1025),
    (4, 8192, 4096, 7168, 1297),
    (1, 1024, 7168, 2048, 925),
    (4, 256, 7168, 2048, 815),
]


def test_rates_of_measured_matmuls() -> None:
    """Large matmuls of these kernels reach 0.721; the shape factors are the shipped ones."""
    device = replace(H100, matmul_efficiency=0.721)
    errors = []
    for groups, m, n, k, rate in DEEPGEMM:
        flops = 2.0 * groups * m * n * k
        predicted = op_time(
            flops=flops,
            bytes_moved=groups * (m * k + n * k + 2 * m * n),
            dtype="float8",
            device=device,
            is_matmul=True,
            matmul_shape=(groups * m, n, k),
        ).seconds
        errors.append(predicted / (flops / (rate * 1e12)))
        print(f"{groups}x{m}x{n}x{k}: predicted/measured {errors[-1]:.2f}")
    assert all(0.8 < error < 1.25 for error in errors)
    assert math.sqrt(sum(math.log(e) ** 2 for e in errors) / len(errors)) < 0.12


# TFLOP/s of FlashAttention-2, forward+backward, causal (operations counted at half), head dim 128,
# for 512, 1024, 2048, 4096, 8192, 16384 keys.
# Source: benchmark figures of github.com/Dao-AILab/flash-attention.
FLASH2 = {"a100": (99, 133, 155, 173, 182, 189), "h100": (163, 221, 265, 294, 308, 328)}


@pytest.mark.parametrize("name", ["a100", "h100"])
def test_rates_of_measured_attention(name: str) -> None:
    device = {"a100": A100, "h100": H100}[name]
    for keys, rate in zip((512, 1024, 2048, 4096, 8192, 16384), FLASH2[name], strict=True):
        seconds = op_time(
            flops=1e13,
            bytes_moved=0,
            dtype="bfloat16",
            device=device,
            is_matmul=True,
            attention_keys=keys,
        ).seconds
        assert 1e13 / seconds / 1e12 == pytest.approx(rate, rel=0.04)


def test_it_is_cheap() -> None:
    begin = time.perf_counter()
    for _ in range(2000):
        op_time(
            flops=1e12,
            bytes_moved=1e8,
            dtype="bfloat16",
            device=H100,
            is_matmul=True,
            matmul_shape=(4096, 4096, 4096),
        )
    assert (time.perf_counter() - begin) / 2000 < 50e-6
