"""How long the arithmetic of a matrix product takes, from its shape, the dtype and the device.

A kernel computes the output in tiles, one per processor at a time; all processors together make a
*wave*. The last wave is seldom full, and edge tiles are computed whole:

    waves   = ceil(batch * ceil(m / tile_m) * ceil(n / tile_n) / processors)
    tile    = 2 tile_m tile_n k / (peak * efficiency / processors) * loss + epilogue
    seconds = min over tile shapes of waves * tile

    loss     = (1 + c (1/tile_m + 1/tile_n)) / (same for 128 x 256)     small tiles load more
    epilogue = matmul_epilogue * 2 bytes * tile_m * tile_n / (bandwidth / processors)

Published best shapes confirm the form: of thousands tried, the fastest fill their last wave
(128 of 132, 320 of 324, 441 of 444 and 3456 of 3478 places on H100, A100, B200 and B300). The
constants are in the device files; docs/calibration.md has the errors.
"""

from __future__ import annotations

from functools import lru_cache
from math import ceil

from autopar.cluster import Device

# The shapes that cuBLAS and CUTLASS offer for 16- and 8-bit operands, up to transposition.
TILES = tuple(
    tile
    for m, n in ((256, 128), (192, 128), (128, 128), (128, 96), (128, 64), (256, 64), (64, 64))
    for tile in sorted({(m, n), (n, m)})
)
_REFERENCE = 1 / 128 + 1 / 256


def matmul_rate(dtype: str, device: Device) -> float:
    """FLOP/s that full tiles over a long k reach; dtypes without a rate run as float32."""
    rates = device.flops
    rate = rates.get(dtype, rates["float32"]) * device.matmul_efficiency
    return rate * device.dtype_efficiency.get(dtype, 1.0)


def matmul_seconds(batch: int, m: int, n: int, k: int, dtype: str, device: Device) -> float:
    """Seconds of `batch` products (m x k) by (k x n), memory traffic not counted.

    A device without `processors` has no tiles: it runs at its rate whatever the shape.
    """
    rate = matmul_rate(dtype, device)
    if batch > 1 and dtype in ("bfloat16", "float16") and (n % 8 or k % 8):
        # Rows that don't start on 16 bytes keep batched products off the matrix units: BLOOM models
        # with head dims 108, 150 and 450 take 35 to 45 % longer than with 104, 112 and 144, as much
        # as products at the float32 rate do (BigScience chronicles, heads sweep).
        rate = min(rate, device.flops["float32"] * device.matmul_efficiency)
    if not device.processors or min(batch, m, n, k) <= 0:
        return 2.0 * batch * m * n * k / rate
    write = device.matmul_epilogue * 2 / device.memory_bytes_per_second
    return _tiled(batch, m, n, k, rate, device.processors, device.tile_overhead, write)


@lru_cache(maxsize=65536)
def _tiled(
    batch: int,
    m: int,
    n: int,
    k: int,
    rate: float,
    processors: int,
    overhead: float,
    write: float,
) -> float:
    whole = 1 + overhead * _REFERENCE
    best = float("inf")
    for rows, columns in TILES:
        waves = ceil(batch * ceil(m / rows) * ceil(n / columns) / processors)
        loss = (1 + overhead * (1 / rows + 1 / columns)) / whole
        # Edge tiles are computed whole, but only what there is gets written.
        written = min(rows, m) * min(columns, n) * write
        best = min(best, waves * (rows * columns * 2 * k * loss / rate + written))
    return best * processors
