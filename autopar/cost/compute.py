"""How long one op takes on one device, and what limits it (roofline).

    seconds = max(operations / (peak * efficiency), bytes / (bandwidth * efficiency), launch)

A matmul of few or short rows does not reach the efficiency of a large one. For local sizes
m, n, k (result m x n, `k` summed over) the efficiency is multiplied by

    m*n / (m*n + half_output)      too few output tiles to fill the device
    k / (k + half_k)               writing the output is not overlapped with the multiplication

with half_k = epilogue * peak / bandwidth, so it follows from the dtype and the device. Fused
attention over `keys` keys has the efficiency e * keys / (keys + half_keys). The constants, what
they were fitted on and the error of the fit are in the device files.
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.cluster import Device


class OpTime(NamedTuple):
    """Seconds, and what they are bound by: `compute`, `memory` or `launch`."""

    seconds: float
    bound: str


def op_time(
    *,
    flops: float,
    bytes_moved: float,
    dtype: str,
    device: Device,
    is_matmul: bool,
    matmul_shape: tuple[int, int, int] | None = None,
    attention_keys: int | None = None,
) -> OpTime:
    """Time of one kernel.

    `flops`: operations really done (a multiply-add is 2; fused causal attention skips half).
    `bytes_moved`: operands read plus results written, once each. `dtype`: name without `torch.`.
    `matmul_shape`: local (m, n, k); fold batch dims into m. `attention_keys`: keys per query, for
    fused attention. With neither, a matmul runs at the efficiency of a large one. Other ops run at
    the float32 rate of the device, because they don't use its matrix units.
    """
    memory = bytes_moved / (device.memory_bytes_per_second * device.memory_efficiency)
    compute = 0.0
    if flops:
        rates = device.flops
        rate = rates.get(dtype, rates["float32"]) if is_matmul else rates["float32"]
        if is_matmul:
            if attention_keys is not None:
                rate *= attention_efficiency(attention_keys, device)
            elif matmul_shape is not None:
                rate *= matmul_efficiency(matmul_shape, rate, device)
            else:
                rate *= device.matmul_efficiency
        compute = flops / rate
    launch = device.launch_seconds
    if launch >= compute and launch >= memory:
        return OpTime(launch, "launch")
    return OpTime(compute, "compute") if compute >= memory else OpTime(memory, "memory")


def matmul_efficiency(shape: tuple[int, int, int], peak: float, device: Device) -> float:
    """Fraction of `peak` (FLOP/s of the dtype) that a matmul of local (m, n, k) reaches."""
    m, n, k = shape
    output = float(m) * n
    half_k = device.matmul_epilogue * peak / device.memory_bytes_per_second
    if output <= 0 or k <= 0:
        return device.matmul_efficiency
    filled = output / (output + device.matmul_half_output)
    return device.matmul_efficiency * filled * k / (k + half_k)


def attention_efficiency(keys: int, device: Device) -> float:
    """Fraction of peak that fused attention reaches; that of a matmul where the device has none."""
    if not device.attention_efficiency:
        return device.matmul_efficiency
    return device.attention_efficiency * keys / (keys + device.attention_half_keys)
