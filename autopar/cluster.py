"""The physical machine: a device, how many, and the link levels that join them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from autopar.errors import UsageError

# How ops become kernels: one each, or chains of element-wise ops fused as torch.compile does.
EXECUTIONS = ("eager", "compile")


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Rates of one generation of fused attention on one device, as fractions of its peak.

    `forward[i]`, `backward[i]`: over many keys, with head dim `head_dims[i]`. `half_keys`: keys at
    which half of it is reached. `causal`, `causal_half_keys`: factor and keys of causal attention,
    whose skipped half is not counted as work.
    """

    head_dims: tuple[int, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    half_keys: float
    causal: float
    causal_half_keys: float


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator. `flops`: peak dense FLOP/s by dtype name (`float32`, `bfloat16`, `float16`).

    `matmul_efficiency`: fraction of peak that a matmul of full tiles reaches, times that of its
    dtype in `dtype_efficiency` where there is one; `memory_efficiency`: fraction of the bandwidth
    that a long kernel reaches; `launch_seconds`: host time to issue one kernel; `kernel_seconds`:
    device time to start and drain one; `context_bytes`: memory outside the allocator (driver
    context, communication buffers).
    `processors`: how many work on tiles of a matmul at once (0: no tiles). `tile_overhead`: rows at
    which loading a tile's operands takes as long as multiplying them. `matmul_epilogue`: how many
    times over a matmul pays for writing its output (2 bytes an element, peak bandwidth) without
    overlap. `attention`: kernels by name; `attention_kernel`: the one that runs.
    `execution`: eager or compile, see `EXECUTIONS`. `even_experts`: routers are made to give every
    expert as many rows, as benchmarks do; else rows go where chance sends them.
    `overlap_experts`: exchanges of experts' rows run beside what needs neither (shared experts).
    `price_per_hour`: US dollars, 0 when unknown.
    `overlap_slowdown`: seconds that compute gets longer per second of communication behind it; 0
    when unknown (`data/step.toml` has what is usual).
    `host_bytes_per_second`: between device and host memory, one direction, while all devices of a
    node do so; `host_memory_bytes_per_second`: a device's share of the host's memory bandwidth. 0:
    not known.
    `divided_slowdown`: part of itself by which a backward gets longer where it is divided in two
    (zero-bubble): the work of the host, and what is in no cache any more, show on a CPU.
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
    kernel_seconds: float = 0.0
    processors: int = 0
    tile_overhead: float = 0.0
    matmul_epilogue: float = 0.0
    dtype_efficiency: dict[str, float] = field(default_factory=dict)
    attention_kernel: str = ""
    attention: dict[str, AttentionKernel] = field(default_factory=dict)
    execution: str = "eager"
    overlap_slowdown: float = 0.0
    divided_slowdown: float = 0.0
    host_bytes_per_second: float = 0.0
    host_memory_bytes_per_second: float = 0.0
    even_experts: bool = False
    overlap_experts: bool = True

    @property
    def usable_bytes(self) -> int:
        """What the allocator can hand out."""
        return self.memory_bytes - self.context_bytes


@dataclass(frozen=True, slots=True)
class Link:
    """One level: `ranks` neighbouring ranks reach each other at this speed (innermost level first).

    `bytes_per_second` is one direction, per rank when all ranks send, as achieved by large
    transfers. `start_seconds`: fixed cost of a collective that uses the level;
    `latency_seconds`: cost of one step between neighbours. `half_saturation_bytes`: bytes per lane
    (one lane per participating rank and level above the innermost) at which a ring still loses as
    much time to filling up as it spends sending.
    `short_rate`, `short_latency_seconds`: part of `bytes_per_second`, and cost of one step, of a
    protocol for short messages that need not fill up. 0: there is none.
    `switch_bytes_per_second`: all-reduce rate (tensor bytes per second) when the switch itself adds
    up; used by groups of more than `switch_above_ranks` ranks. 0: the switch can't.
    `gather_efficiency`, `exchange_efficiency`, `dispatch_efficiency`: speed relative to
    `bytes_per_second` of all_gather and reduce_scatter, of an all_to_all, and of one by a kernel
    made for expert dispatch.
    """

    name: str
    ranks: int
    bytes_per_second: float
    latency_seconds: float
    start_seconds: float = 0.0
    half_saturation_bytes: float = 0.0
    short_rate: float = 0.0
    short_latency_seconds: float = 0.0
    switch_bytes_per_second: float = 0.0
    switch_above_ranks: int = 4
    gather_efficiency: float = 1.0
    exchange_efficiency: float = 1.0
    dispatch_efficiency: float = 1.0

    def __hash__(self) -> int:
        # Links are in the keys of what collectives take: few of them are as quick as all fields.
        return hash((self.name, self.ranks, self.bytes_per_second))


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

    def with_execution(self, execution: str) -> Cluster:
        """The same cluster whose programs run `eager` or `compile`; else `UsageError`."""
        if execution not in EXECUTIONS:
            raise UsageError(
                f"execution {execution!r}", next_step=f"choose one of {', '.join(EXECUTIONS)}"
            )
        return replace(self, device=replace(self.device, execution=execution))

    @staticmethod
    def parse(text: str) -> Cluster:
        """`h100:8x8` (NODESxGPUS of a known device), `cpu:4` (one node), or the path of a TOML.

        `a100-80:2x8/efa-4x100` names the fabric between nodes. Raises `UsageError` that names the
        known devices for anything else.
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
