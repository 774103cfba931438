"""Figures that were fitted to prices are the figures that the prices were made with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.cluster import AttentionKernel, Cluster, Device, Link
from autopar.cost.attention_efficiency import attention_seconds
from autopar.cost.collective import collective_time
from autopar.cost.compute import op_time
from autopar.cost.matmul_efficiency import matmul_seconds
from autopar.errors import UsageError
from autopar.runtime.device_rates import Sample
from autopar.runtime.link_rates import LinkSample
from autopar.workflow.fitted_cluster import fitted_device, fitted_link

KERNEL = AttentionKernel((64, 128), (0.3, 0.4), (0.2, 0.25), 200.0, 0.9, 500.0)


def samples_of(device: Device) -> list[Sample]:
    """What `runtime.device_rates` would measure if the device kept to its prices."""
    found = [Sample("launch", "float32", (), 0.0, device.launch_seconds)]
    for nbytes in (2.0**i for i in range(16, 32, 2)):
        seconds = op_time(0.0, nbytes, replace(device, launch_seconds=0.0)).seconds
        found.append(Sample("memory", "float32", (int(nbytes),), nbytes, seconds))
    for dtype in ("float32", "bfloat16"):
        for size in (1024, 4096, 8192):
            shape = (size, size, size)
            seconds = matmul_seconds(1, *shape, dtype, device)
            found.append(Sample("matmul", dtype, shape, 2.0 * size**3, seconds))
    for dim in KERNEL.head_dims:
        for keys in (1024, 4096, 16384):
            for causal in (0, 1):
                for direction, part in (("forward", 1.0), ("backward", 2.5)):
                    work = part * 4.0 * 256 * keys * keys * dim * (0.5 if causal else 1)
                    seconds = attention_seconds(
                        work, heads=256, queries=keys, keys=keys, head_dim=dim, causal=bool(causal),
                        backward=direction == "backward", dtype="bfloat16", device=device,
                    )  # fmt: skip
                    shape4 = (256, keys, dim, causal)
                    found.append(
                        Sample(f"attention {direction}", "bfloat16", shape4, work, seconds)
                    )
    return found


def test_a_known_gpu_gets_its_figures_back() -> None:
    base = Cluster.parse("h100:1x8").device
    truth = replace(
        base, matmul_efficiency=0.7, dtype_efficiency={"float32": 0.9, "bfloat16": 1.0},
        memory_efficiency=0.8, kernel_seconds=3e-6, launch_seconds=4e-6,
        attention={"measured": KERNEL}, attention_kernel="measured",
    )  # fmt: skip
    found = fitted_device(samples_of(truth), name="h100", memory_bytes=10**10, base=base)
    for key in ("matmul_efficiency", "memory_efficiency", "kernel_seconds", "launch_seconds"):
        assert getattr(found, key) == pytest.approx(getattr(truth, key), rel=0.03), key
    assert found.flops == base.flops and found.memory_bytes == 10**10
    assert found.dtype_efficiency == pytest.approx(truth.dtype_efficiency, rel=0.05)
    kernel = found.attention["measured"]
    assert kernel.forward == pytest.approx(KERNEL.forward, rel=0.02)
    assert kernel.backward == pytest.approx(KERNEL.backward, rel=0.02)
    assert kernel.half_keys == pytest.approx(200, rel=0.02)
    assert kernel.causal == pytest.approx(0.9, rel=0.02)
    assert kernel.causal_half_keys == pytest.approx(500, rel=0.02)


def test_an_unknown_device_has_its_best_rate_as_peak() -> None:
    truth = Cluster.parse("cpu:1").device
    truth = replace(truth, attention={"measured": KERNEL}, attention_kernel="measured")
    found = fitted_device(samples_of(truth), name="cpu", memory_bytes=10**10)
    assert found.flops["float32"] == pytest.approx(0.7 * 5e10)
    assert found.matmul_efficiency == pytest.approx(1.0)
    copy = op_time(0.0, 1e9, found).seconds
    assert copy == pytest.approx(op_time(0.0, 1e9, truth).seconds, rel=0.01)


def test_a_host_that_runs_its_kernels_pays_for_both() -> None:
    samples = [
        Sample("matmul", "float32", (256, 256, 256), 2.0 * 256**3, 1e-3),
        *(Sample("memory", "float32", (n,), n, 2e-6 + n / 1e10) for n in (1e5, 1e6)),
        Sample("launch", "float32", (), 0.0, 9e-6),
    ]
    apart = fitted_device(samples, name="gpu", memory_bytes=1)
    alone = fitted_device(samples, name="cpu", memory_bytes=1, is_host=True)
    assert apart.kernel_seconds == pytest.approx(2e-6)
    assert alone.kernel_seconds == pytest.approx(9e-6) == alone.launch_seconds


def test_without_a_product_there_is_no_device() -> None:
    with pytest.raises(UsageError, match="no matmul was measured"):
        fitted_device([], name="x", memory_bytes=1)


@pytest.mark.parametrize("group", [2, 8])
def test_a_link_gets_its_figures_back(group: int) -> None:
    truth = Link("node", group, 2e9, 2e-5, 1e-4, gather_efficiency=0.4, exchange_efficiency=0.8)
    cluster = replace(Cluster.parse(f"cpu:{group}"), links=(truth,))
    samples = [
        LinkSample(kind, group, 1, n, collective_time(kind, n, group, 1, cluster))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
        for n in (2**12, 2**16, 2**20, 2**24)
    ]
    found = fitted_link(samples, name="node", ranks=group, innermost=True)
    keys = ("bytes_per_second", "latency_seconds", "start_seconds")
    for key in (*keys, "gather_efficiency", "exchange_efficiency"):
        assert getattr(found, key) == pytest.approx(getattr(truth, key), rel=0.02), key


def test_noise_gives_no_negative_figure() -> None:
    samples = [
        LinkSample("all_reduce", 2, 1, 2**12, 5e-4),
        LinkSample("all_reduce", 2, 1, 2**16, 4e-4),
        LinkSample("all_gather", 2, 1, 2**16, 6e-4),
    ]
    found = fitted_link(samples, name="node", ranks=2, innermost=True)
    assert found.bytes_per_second > 0 and found.latency_seconds >= 0 and found.start_seconds >= 0
    with pytest.raises(UsageError, match="no collective of the node level"):
        fitted_link([], name="node", ranks=2, innermost=True)
