"""How long the arithmetic of fused attention takes, from head dim, keys, mask and kernel.

    rate = peak * e(head dim) * keys / (keys + half_keys)                 whole attention
    rate = peak * e(head dim) * causal * keys / (keys + causal_half_keys) causal, done FLOPs only

e is measured at some head dims and interpolated; below the first it falls in proportion, because
the exponentials are as many and the products smaller. A block of a kernel takes 128 queries of one
head: fewer blocks than processors leave processors idle.

The rates of a kernel generation (FlashAttention-2 and -3, cuDNN) are in the device files under
`attention`; `attention_kernel` says which one runs.
"""

from __future__ import annotations

from bisect import bisect_left
from math import ceil

from autopar.cluster import AttentionKernel, Device
from autopar.cost.matmul_efficiency import matmul_rate

_QUERIES_PER_BLOCK = 128
# Exported as FLOPs of the backward over those of the forward: scores are computed again.
BACKWARD_PRODUCTS = 2.5


def attention_seconds(
    flops: float,
    *,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    causal: bool,
    backward: bool,
    dtype: str,
    device: Device,
) -> float:
    """Seconds of the arithmetic. `flops`: those really done (a causal kernel skips half); `heads`:
    of all samples together. Without a kernel's figures it runs at the rate of a matmul."""
    kernel = device.attention.get(device.attention_kernel)
    if kernel is None:
        rate = matmul_rate(dtype, device)
    else:
        rate = device.flops.get(dtype, device.flops["float32"])
        rate *= attention_efficiency(kernel, keys, head_dim, causal=causal, backward=backward)
    if device.processors:
        blocks = heads * ceil(queries / _QUERIES_PER_BLOCK)
        rate *= min(1.0, blocks / device.processors)
    return flops / rate


def attention_efficiency(
    kernel: AttentionKernel, keys: int, head_dim: int, *, causal: bool, backward: bool
) -> float:
    """Fraction of the peak rate that a fused attention kernel reaches on a full device."""
    efficiency = _at(kernel.head_dims, kernel.backward if backward else kernel.forward, head_dim)
    half = kernel.causal_half_keys if causal else kernel.half_keys
    return efficiency * (kernel.causal if causal else 1.0) * keys / (keys + half)


def _at(dims: tuple[int, ...], values: tuple[float, ...], head_dim: int) -> float:
    """`values` measured at `dims`, interpolated; proportional below, constant above."""
    if head_dim <= dims[0]:
        return values[0] * head_dim / dims[0]
    if head_dim >= dims[-1]:
        return values[-1]
    right = bisect_left(dims, head_dim)
    left = right - 1
    part = (head_dim - dims[left]) / (dims[right] - dims[left])
    return values[left] + part * (values[right] - values[left])
