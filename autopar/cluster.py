"""The physical machine: a device, how many, and the link levels that join them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from autopar.errors import UsageError


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `flops`: peak dense FLOP/s by dtype name (`float32`, `bfloat16`, `float16`).

    `matmul_efficiency`: fraction of peak that a large matmul reaches; `launch_seconds`: fixed cost
    of one kernel; `context_bytes`: memory outside the allocator (driver context, communication
    buffers).
    `matmul_half_output`: output elements at which a matmul fills half of the device.
    `matmul_epilogue`: how many times over a matmul pays for writing its output (2 bytes an element,
    peak bandwidth) without overlap. `attention_efficiency`, `attention_half_keys`: fraction of peak
    of fused attention over many keys, and the keys at which it reaches half of that.
    `price_per_hour`: US dollars, 0 when unknown.
    """

    name: str
    memory_bytes: int
    memory_bytes_per_second: float
    flops: dict[str, float]
    matmul_efficiency: float
    memory_efficiency: float
    launch_seconds: float
    context_bytes: int
    price_per_hour: float = 0.0
    matmul_half_output: float = 0.0
    matmul_epilogue: float = 0.0
    attention_efficiency: float = 0.0
    attention_half_keys: float = 0.0

    @property
    def usable_bytes(self) -> int:
        """What the allocator can hand out."""
        return self.memory_bytes - self.context_bytes


@dataclass(frozen=True, slots=True)
class Link:
    """One level: `ranks` neighbouring ranks reach each other at this speed (innermost level first).

    `bytes_per_second` is one direction, per rank, as achieved by large transfers.
    `latency_seconds`: cost of a collective for each doubling of the group at this level.
    `half_saturation_bytes`: bytes per lane (one lane per participating rank and level above the
    innermost) at which a ring still loses as much time to filling up as it spends sending.
    `switch_bytes_per_second`: all-reduce rate (tensor bytes per second) when the switch itself adds
    up; used by groups of more than `switch_above_ranks` ranks. 0: the switch can't.
    `exchange_efficiency`: speed of an all_to_all relative to `bytes_per_second`.
    """

    name: str
    ranks: int
    bytes_per_second: float
    latency_seconds: float
    half_saturation_bytes: float = 0.0
    switch_bytes_per_second: float = 0.0
    switch_above_ranks: int = 4
    exchange_efficiency: float = 1.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """`nodes` x `ranks_per_node` devices; `links` from the innermost level outwards."""

    name: str
    device: Device
    nodes: int
    ranks_per_node: int
    links: tuple[Link, ...]

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def price_per_hour(self) -> float:
        """US dollars for the whole cluster; 0 when the price of the device is unknown."""
        return self.device.price_per_hour * self.size

    def link_for(self, group: int, stride: int) -> Link:
        """The slowest level that some group of `group` ranks spaced by `stride` has to cross.

        All groups of a mesh axis run at once: a level holds them all only if blocks of
        `group * stride` ranks tile it.
        """
        block = group * stride
        for link in self.links:
            if group == 1 or (block <= link.ranks and link.ranks % block == 0):
                return link
        return self.links[-1]

    def with_memory_limit(self, limit: int) -> Cluster:
        """The same cluster where tensors may take at most `limit` bytes per rank.

        The driver context is outside the limit unless the device is too small for both.
        Raises `UsageError` for a limit that is not positive or exceeds the device.
        """
        device = self.device
        if not 0 < limit <= device.memory_bytes:
            raise UsageError(
                f"memory limit of {limit} bytes on {device.name}, which has {device.memory_bytes}",
                next_step="give a limit above 0 and at most the memory of the device",
            )
        context = max(0, device.context_bytes - (device.memory_bytes - limit))
        return replace(self, device=replace(device, memory_bytes=limit, context_bytes=context))

    @staticmethod
    def parse(text: str) -> Cluster:
        """`h100:8x8` (NODESxGPUS of a known device), `cpu:4` (one node), or the path of a TOML.

        Raises `UsageError` that names the known devices for anything else.
        """
        from autopar.cluster_toml import parse_cluster

        return parse_cluster(text)

    @staticmethod
    def from_toml(path: str | Path) -> Cluster:
        """Read a cluster file (the format that `to_toml` writes); raises `UsageError`."""
        from autopar.cluster_toml import read_cluster

        return read_cluster(Path(path))

    def to_toml(self) -> str:
        """The text of a cluster file that `from_toml` reads back as an equal cluster."""
        from autopar.cluster_toml import write_cluster

        return write_cluster(self)
