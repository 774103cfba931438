"""From measurements to the figures of a `Device` and its `Link`s: the price model inverted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import log2
from typing import TYPE_CHECKING

import numpy as np

from autopar.cluster import AttentionKernel, Device, Link
from autopar.cost.collective import collective_latency_steps
from autopar.cost.matmul_efficiency import matmul_seconds
from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.runtime.device_rates import Sample
    from autopar.runtime.link_rates import LinkSample

KERNEL = "measured"


def fitted_device(
    samples: Sequence[Sample],
    *,
    name: str,
    memory_bytes: int,
    base: Device | None = None,
    is_host: bool = False,
) -> Device:
    """A device whose prices give the samples back. `base`: a known device of the same kind, whose
    peaks, tiles and context are kept; without one the peak of a dtype is its best measured rate.
    `is_host`: the device issues its kernels itself, so that launches do not hide behind them.
    """
    matmuls = {d: _of(samples, "matmul", d) for d in sorted({s.dtype for s in samples})}
    matmuls = {dtype: found for dtype, found in matmuls.items() if found}
    if "float32" not in matmuls:
        raise UsageError("no matmul was measured", next_step="give profile more time (--seconds)")
    best = {dtype: max(s.rate for s in found) for dtype, found in matmuls.items()}
    peaks = {**best, **base.flops} if base else best
    start, bandwidth = _line([(s.work, s.seconds) for s in _of(samples, "memory", "float32")])
    peak_bandwidth = max(
        bandwidth,
        *(s.rate for s in samples if s.what == "memory"),
        base.memory_bytes_per_second if base else 0.0,
    )
    launch = min((s.seconds for s in samples if s.what == "launch"), default=start)
    device = Device(
        name=name,
        memory_bytes=memory_bytes,
        memory_bytes_per_second=peak_bandwidth,
        flops=peaks,
        matmul_efficiency=1.0,
        memory_efficiency=min(1.0, bandwidth / peak_bandwidth),
        launch_seconds=launch,
        context_bytes=base.context_bytes if base else 0,
        price_per_hour=base.price_per_hour if base else 0.0,
        kernel_seconds=max(start, launch) if is_host else start,
    )
    if base is not None:
        tiles = ("processors", "tile_overhead", "matmul_epilogue")
        host = ("host_bytes_per_second", "host_memory_bytes_per_second")
        device = replace(device, **{key: getattr(base, key) for key in (*tiles, *host)})
    # Large products decide: a sum of seconds weighs by time.
    reached = {dtype: _seconds_at_peak(found, device) for dtype, found in matmuls.items()}
    common = min(1.0, max(reached.values()))
    relative = {dtype: share / common for dtype, share in reached.items()}
    device = replace(device, matmul_efficiency=common, dtype_efficiency=relative)
    kernel = _attention_kernel(samples, peaks)
    if kernel is not None:
        device = replace(device, attention={KERNEL: kernel}, attention_kernel=KERNEL)
    return device


def fitted_link(samples: Sequence[LinkSample], *, name: str, ranks: int, innermost: bool) -> Link:
    """A link that gives the collectives of one level back: seconds = start + steps * latency +
    share * bytes / rate, relative errors least; then the all-to-all's efficiency on top.
    """
    used = [s for s in samples if s.kind in ("all_reduce", "all_gather", "reduce_scatter")]
    if not used:
        raise UsageError(
            f"no collective of the {name} level could be measured",
            next_step="check that the process group works (all_reduce, all_gather)",
        )
    rows = []
    for s in used:
        share = (2 if s.kind == "all_reduce" else 1) * (s.group - 1) / s.group
        steps = collective_latency_steps(s.kind, s.group, tree=not innermost)
        gathers = s.kind != "all_reduce"
        moved = share * s.nbytes
        rows.append([1.0, steps, 0.0 if gathers else moved, moved if gathers else 0.0])
    seconds = np.array([s.seconds for s in used])
    start, latency, reduce, gather = _non_negative(np.array(rows), seconds)
    per_byte = reduce or gather
    rate = 1 / per_byte if per_byte else max(s.nbytes / s.seconds for s in used)
    efficiency = reduce / gather if reduce and gather else 1.0
    link = Link(name, ranks, rate, latency, start, gather_efficiency=efficiency)
    exchanges = [s for s in samples if s.kind == "all_to_all"]
    if exchanges:
        largest = max(exchanges, key=lambda s: s.nbytes)
        left = largest.seconds - start - latency * log2(largest.group)
        sent = largest.nbytes / largest.group * (1 - 1 / largest.group)
        efficiency = sent / max(left, 0.05 * largest.seconds) / rate
        link = replace(link, exchange_efficiency=efficiency, dispatch_efficiency=efficiency)
    return link


def _of(samples: Iterable[Sample], what: str, dtype: str) -> list[Sample]:
    return [s for s in samples if s.what == what and s.dtype == dtype]


def _seconds_at_peak(samples: list[Sample], device: Device) -> float:
    """Seconds at full efficiency over those measured, of all products together."""
    ideal = 0.0
    for sample in samples:
        m, n, k = sample.shape
        ideal += matmul_seconds(1, m, n, k, sample.dtype, device)
    return ideal / sum(s.seconds for s in samples)


def _line(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(seconds at no bytes, bytes per second) of seconds over bytes, relative errors least."""
    columns = np.array([[1.0, nbytes] for nbytes, _ in points])
    start, slope = _non_negative(columns, np.array([seconds for _, seconds in points]))
    return start, 1 / slope if slope else max(nbytes / seconds for nbytes, seconds in points)


def _non_negative(columns: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Least relative squares of `columns @ x = seconds` with x >= 0: an unknown that comes out
    negative is left out."""
    kept = list(range(columns.shape[1]))
    while True:
        scaled = columns[:, kept] / seconds[:, None]
        norms = np.linalg.norm(scaled, axis=0)
        norms[norms == 0.0] = 1.0
        found = np.linalg.lstsq(scaled / norms, np.ones(len(seconds)), rcond=None)[0] / norms
        negative = [k for k, value in zip(kept, found, strict=True) if value < 0]
        if not negative:
            values = [0.0] * columns.shape[1]
            for k, value in zip(kept, found, strict=True):
                values[k] = float(value)
            return values
        kept = [k for k in kept if k not in negative]


def _attention_kernel(samples: Sequence[Sample], peaks: dict[str, float]) -> AttentionKernel | None:
    """Fits rate = peak * e * keys / (keys + half): seconds per FLOP are a line over 1 / keys. The
    half and the factor of causal attention are those of the largest head dim."""

    def line(direction: str, dim: int, causal: int) -> tuple[float, float] | None:
        """(e, half), None without measurements."""
        of = [s for s in samples if s.what == f"attention {direction}"]
        of = [s for s in of if s.shape[2:] == (dim, causal)]
        if not of:
            return None
        rows = np.array([[1.0, 1.0 / s.shape[1]] for s in of])
        constant, slope = _non_negative(rows, np.array([peaks[s.dtype] / s.rate for s in of]))
        if not constant:  # only short keys were measured
            return max(s.rate / peaks[s.dtype] for s in of), 0.0
        return 1 / constant, slope / constant

    found = {}
    for dim in sorted({s.shape[2] for s in samples if s.what.startswith("attention")}):
        forward, backward = line("forward", dim, 0), line("backward", dim, 0)
        if forward and backward:
            found[dim] = (forward, backward)
    if not found:
        return None
    last = max(found)
    whole = found[last][0]
    causal = line("forward", last, 1) or whole
    return AttentionKernel(
        head_dims=tuple(found),
        forward=tuple(forward[0] for forward, _ in found.values()),
        backward=tuple(backward[0] for _, backward in found.values()),
        half_keys=whole[1],
        causal=causal[0] / whole[0],
        causal_half_keys=causal[1],
    )
