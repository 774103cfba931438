"""Measure the machine that this runs on and describe it as a cluster.

Every rank that torchrun started calls `profile`; they measure at the same time, because they will
compute at the same time. Rank 0 gets the cluster.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from autopar.cluster import Cluster, Device, Link
from autopar.cost.collective import collective_time
from autopar.devices import load_device
from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.runtime.device_rates import (
    Effort,
    Sample,
    attention_samples,
    launch_sample,
    matmul_samples,
    memory_samples,
)
from autopar.runtime.divided_slowdown import measured_division
from autopar.runtime.link_rates import LinkSample, collective_samples, measured_slowdown
from autopar.runtime.ranks import Ranks
from autopar.workflow.fitted_cluster import fitted_device, fitted_link
from autopar.workflow.world import known_device_name, world_size

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Collectives: of `seconds`, what remains is for the device.
_LINK_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured, and the cluster that was fitted to it."""

    cluster: Cluster
    samples: tuple[Sample, ...]
    links: tuple[LinkSample, ...]
    seconds: float

    def link_errors(self) -> list[tuple[LinkSample, float]]:
        """Each collective and the seconds that the fitted cluster predicts for it."""
        return [
            (s, collective_time(s.kind, s.nbytes, s.group, s.stride, self.cluster))
            for s in self.links
        ]


# Says what is measured, and which part of all is done.
Report = Callable[[str, float], None]


def profile(
    *, seconds: float = 100.0, quick: bool = False, mesh: Mesh | None = None, report: Report
) -> Profile:
    """Measure for about `seconds` (`quick`: small sizes only). `mesh`: measure the groups of its
    axes too; they are compared, not fitted. Raises `UsageError` when the mesh does not fit."""
    begin = time.perf_counter()
    ranks = Ranks.create(Mesh(dp=world_size()), timeout_seconds=max(120.0, 2 * seconds))
    size = ranks.mesh.size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if size % local:
        raise UsageError(
            f"{size} ranks on nodes of {local}", next_step="start as many ranks on every node"
        )
    if mesh is not None and mesh.size != size:
        raise UsageError(
            f"a mesh of {mesh.size} ranks, {size} are running",
            next_step="give degrees whose product is the number of ranks",
        )
    measured: list[Sample] = []
    share = 1.0 if size == 1 else 1 - _LINK_SHARE
    for sample in _device_samples(ranks.device, seconds * share, quick):
        measured.append(sample)
        report(f"{sample.what} {sample.dtype}", _part(begin, seconds))
    levels = [(g, s) for g, s in ((local, 1), (size // local, local)) if g > 1]
    axes = [] if mesh is None else [(mesh.degree(a), mesh.stride(a)) for a in ("tp", "dp", "pp")]
    groups = list(dict.fromkeys(levels + [axis for axis in axes if axis[0] > 1]))
    links: list[LinkSample] = []
    for group, stride in groups:
        most = 2**18 if quick else 2**26
        unit = 4 * group * group
        sizes = tuple(unit * 4**i for i in range(1, 13) if 2**11 <= unit * 4**i <= most)
        each = seconds * _LINK_SHARE / len(groups) / (5 * len(sizes))
        for found in collective_samples(ranks, group, stride, sizes, each):
            links.append(found)
            report(f"{found.kind} of {group} ranks", _part(begin, seconds))
    cluster = _cluster(ranks.device, measured, links, size // local, local)
    divided = measured_division(ranks.device)
    cluster = replace(cluster, device=replace(cluster.device, divided_slowdown=divided))
    if size > 1:
        # At least a little: 0 would mean that nothing was measured.
        slowdown = max(0.01, measured_slowdown(ranks))
        cluster = replace(cluster, device=replace(cluster.device, overlap_slowdown=slowdown))
    report("done", 1.0)
    return Profile(cluster, tuple(measured), tuple(links), time.perf_counter() - begin)


def _part(begin: float, seconds: float) -> float:
    return min(0.99, (time.perf_counter() - begin) / seconds)


def _device_samples(device: torch.device, seconds: float, quick: bool) -> Iterator[Sample]:
    """Each kind of measurement has its share of the time; what is left is not used."""
    largest = {True: 512, False: 2048 if device.type == "cpu" else 8192}[quick]
    effort = Effort(seconds / 60, seconds / 250, largest)
    yield launch_sample(device)
    yield from _until(memory_samples(device, effort), seconds * 0.1)
    for dtype in DTYPES:
        yield from _until(matmul_samples(device, dtype, effort), seconds * 0.2)
    attended = torch.float32 if device.type == "cpu" else torch.bfloat16
    yield from _until(attention_samples(device, attended, effort), seconds * 0.3)


def _until(samples: Iterator[Sample], seconds: float) -> Iterator[Sample]:
    begin = time.perf_counter()
    for sample in samples:
        yield sample
        if time.perf_counter() - begin > seconds:
            return


def _cluster(
    device: torch.device, samples: list[Sample], links: list[LinkSample], nodes: int, local: int
) -> Cluster:
    base = _base(device)
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), _cuda_memory(device)
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // local
        name = platform.processor() or platform.machine()
    is_host = device.type == "cpu"
    fitted = fitted_device(samples, name=name, memory_bytes=memory, base=base, is_host=is_host)
    levels: list[Link] = []
    if local > 1:
        inside = [s for s in links if (s.group, s.stride) == (local, 1)]
        levels.append(fitted_link(inside, name="node", ranks=local, innermost=True))
    if nodes > 1:
        between = [s for s in links if (s.group, s.stride) == (nodes, local)]
        outer = fitted_link(between, name="network", ranks=nodes * local, innermost=not levels)
        levels.append(outer)
    if not levels:  # one rank has nobody to talk to: nothing of this is ever charged
        levels.append(Link("none", 1, fitted.memory_bytes_per_second, 0.0))
    return Cluster(f"measured {nodes}x{local}", fitted, nodes, local, tuple(levels))


def _base(device: torch.device) -> Device | None:
    known = known_device_name() if device.type == "cuda" else None
    return replace(load_device(known).device) if known else None


def _cuda_memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)
