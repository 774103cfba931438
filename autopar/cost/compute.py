"""How long one kernel takes on one device, and what limits it (roofline).

    seconds = max(launch_seconds, kernel_seconds + max(arithmetic, memory))
    memory  = bytes / (bandwidth * efficiency)

`launch_seconds` is what the host needs to issue it, `kernel_seconds` what the device needs to start
and drain it: a kernel that moves few bytes reaches only a part of the bandwidth. The arithmetic of
products and attention is in `matmul_efficiency` and `attention_efficiency`.
"""

from __future__ import annotations

from typing import NamedTuple

from autopar.cluster import Device


class OpTime(NamedTuple):
    """Seconds, and what they are bound by: `compute`, `memory` or `launch`."""

    seconds: float
    bound: str


def op_time(
    arithmetic: float, bytes_moved: float, device: Device, *, starts: bool = True
) -> OpTime:
    """Time of one kernel, or of an op's part of one.

    `arithmetic`: seconds of its operations. `bytes_moved`: operands read plus results written, once
    each. `starts`: whether the kernel's start is charged here; False for an op that another one of
    a fused kernel pays for, which then may cost nothing.
    """
    memory = bytes_moved / (device.memory_bytes_per_second * device.memory_efficiency)
    work = max(arithmetic, memory)
    bound = "compute" if arithmetic > memory else "memory"
    if not starts:
        return OpTime(work, bound)
    seconds = max(device.launch_seconds, device.kernel_seconds + work)
    if work < device.kernel_seconds or seconds == device.launch_seconds:
        bound = "launch"
    return OpTime(seconds, bound)
