from __future__ import annotations

import time
from dataclasses import replace

import pytest

from autopar.cluster import Cluster
from autopar.cost.matmul_efficiency import matmul_rate, matmul_seconds

H100 = Cluster.parse("h100:1x8").device
CPU = Cluster.parse("cpu:1").device


def efficiency(m: int, n: int, k: int, dtype: str = "bfloat16", batch: int = 1) -> float:
    flops = 2.0 * batch * m * n * k
    return flops / matmul_seconds(batch, m, n, k, dtype, H100) / matmul_rate(dtype, H100)


def test_large_products_run_at_the_rate_of_their_dtype() -> None:
    assert matmul_rate("bfloat16", H100) == 989e12 * H100.matmul_efficiency
    assert matmul_rate("float8", H100) == pytest.approx(1979e12 * 0.75 * 0.93)
    assert matmul_rate("int64", H100) == matmul_rate("float32", H100)
    assert efficiency(2**15, 2**15, 2**15) == pytest.approx(1.0, abs=0.03)


def test_the_last_wave_is_paid_whole() -> None:
    # 128 x 256 tiles: 11 x 12 of them are one wave of 132 processors, one column more is two.
    full, more = efficiency(1408, 3072, 8192), efficiency(1408, 3200, 8192)
    assert full > 0.93 and more < 0.9 * full
    one = matmul_seconds(1, 1408, 3072, 8192, "bfloat16", H100)
    assert matmul_seconds(1, 1408, 3071, 8192, "bfloat16", H100) == one


def test_few_rows_and_a_short_sum_cost_efficiency() -> None:
    assert efficiency(16, 4096, 4096) < 0.5 * efficiency(4096, 4096, 4096)
    assert efficiency(4096, 4096, 256) < 0.5 * efficiency(4096, 4096, 4096)
    # Eight-way tensor parallelism of a layer is no eighth of its time.
    whole = matmul_seconds(1, 2048, 4096, 4096, "bfloat16", H100)
    assert matmul_seconds(1, 2048, 512, 4096, "bfloat16", H100) > whole / 8 * 1.1


def test_products_of_a_batch_share_the_waves() -> None:
    assert efficiency(256, 256, 4096, batch=64) > 2 * efficiency(256, 256, 4096)


def test_a_device_without_processors_has_no_tiles() -> None:
    flops = 2.0 * 3 * 5 * 7
    assert matmul_seconds(1, 3, 5, 7, "float32", CPU) == flops / matmul_rate("float32", CPU)


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "tflops"),
    [
        ("a100-80", 1024, 10240, 5120, 271.2),
        ("h100", 2048, 2048, 13312, 794.5),
        ("b200", 1792, 16128, 3072, 1745.0),
        ("b200", 12288, 18432, 1024, 1769.0),
        ("gb200", 4096, 9728, 2048, 1822.0),
    ],
)
def test_the_best_of_thousands_of_shapes_fill_their_waves(
    name: str, m: int, n: int, k: int, tflops: float
) -> None:
    """What a search over shapes found (ml-engineering, compute/accelerator/README.md 351-358) is
    what the model gives when the best rate takes the place of the sustained one."""
    device = Cluster.parse(f"{name}:1x8").device
    device = replace(device, matmul_efficiency=device.matmul_efficiency / 0.87)
    rate = 2.0 * m * n * k / (matmul_seconds(1, m, n, k, "bfloat16", device) + 2e-6) / 1e12
    assert rate == pytest.approx(tflops, rel=0.03)


def test_it_is_cheap() -> None:
    begin = time.process_time()
    for m in range(1000):
        matmul_seconds(1, 4096 + m, 4096, 4096, "bfloat16", H100)
    fresh = time.process_time() - begin
    begin = time.process_time()
    for m in range(1000):
        matmul_seconds(1, 4096 + m, 4096, 4096, "bfloat16", H100)
    assert fresh / 1000 < 100e-6 and (time.process_time() - begin) / 1000 < 20e-6
