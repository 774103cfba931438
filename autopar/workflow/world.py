"""The ranks that `compile` finds itself on: how many, what they are, and one decision for all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from autopar import errors
from autopar.cluster import Cluster
from autopar.errors import AutoparError, PlanError, UsageError
from autopar.mesh import AXES, ORDERS, REPLICATE, SHARD
from autopar.plan_document import Plan
from autopar.search.options import Pins, parse_pins

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autopar.runtime.ranks import Ranks

_FROM_OUTERMOST = {
    ORDERS[0]: ("pp", "dp", REPLICATE, SHARD, "cp", "tp"),
    ORDERS[1]: ("dp", REPLICATE, SHARD, "pp", "cp", "tp"),
}


def world_size() -> int:
    """Ranks that torchrun, or an initialised process group, says there are."""
    import torch.distributed as dist

    return (
        dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    )


def decide_on_first_rank(ranks: Ranks, decide: Callable[[], Plan]) -> Plan:
    """The plan that rank 0 makes, on every rank; its error, on every rank, if it has none."""
    import torch.distributed as dist

    box: list[Any] = [None]
    if ranks.rank == 0:
        try:
            box = [decide().to_dict()]
        except AutoparError as error:
            # As text: not every exception survives pickling, and then the others would wait.
            box = [(type(error).__name__, error.message, error.next_step)]
        except Exception as error:
            box = [("RuntimeFault", f"rank 0: {type(error).__name__}: {error}", "")]
    dist.broadcast_object_list(box, src=0, group=ranks.control)
    if isinstance(box[0], tuple):
        kind, message, step = box[0]
        raise getattr(errors, kind)(message, next_step=step)
    return Plan.from_dict(box[0])


def world_cluster(
    mesh: Cluster | DeviceMesh | str | None, size: int, device_type: str, pins: str | Pins
) -> tuple[Cluster, Pins]:
    """The cluster that `compile` plans for, and the pins with a DeviceMesh's degrees added."""
    pinned = parse_pins(pins) if isinstance(pins, str) else pins
    if isinstance(mesh, str):
        mesh = Cluster.parse(mesh)
    if isinstance(mesh, Cluster):
        if mesh.size != size:
            raise PlanError(
                f"the cluster {mesh.name} has {mesh.size} ranks, torchrun started {size}",
                next_step=f"start {mesh.size} ranks, or give a cluster of {size}",
            )
        return mesh, pinned
    if mesh is not None:
        pinned = _pinned(mesh, pinned)
    return local_cluster(size, device_type), pinned


def _pinned(mesh: DeviceMesh, pins: Pins) -> Pins:
    """`pins` with what the dims of the mesh say."""
    names = mesh.mesh_dim_names or ()
    degrees: Mapping[str, int] = {name: mesh.size(i) for i, name in enumerate(names)}
    degrees, sharding = _whole_dp(degrees)
    unknown = sorted(set(degrees) - set(AXES))
    if unknown or not names:
        raise UsageError(
            f"DeviceMesh dims are {names or 'unnamed'}",
            next_step="name its dims pp, dp, cp and tp (any of them, or dp_replicate and "
            "dp_shard instead of dp): they pin those degrees",
        )
    order = _order(mesh, names, pins)
    told = {**{axis: degrees.get(axis, 1) for axis in AXES}, **sharding}
    for name, degree in told.items():
        if getattr(pins, name) not in (None, degree):
            raise UsageError(
                f"the pins say {name}={getattr(pins, name)}, the DeviceMesh with dims {names} "
                f"of {tuple(mesh.shape)} ranks says {name}={degree}",
                next_step="leave it out of the pins, or change the mesh",
            )
    return replace(
        pins,
        pp=told["pp"],
        dp=told["dp"],
        cp=told["cp"],
        tp=told["tp"],
        zero=told.get("zero", pins.zero),
        shard=told.get("shard", pins.shard),
        order=order,
    )


def _order(mesh: DeviceMesh, names: Sequence[str], pins: Pins) -> str | None:
    """How plans lay out the ranks that the mesh has: neighbours are of the innermost axis. Without
    stages or replicas there is one way only, and the pins stay as they are."""
    laid = {order: _FROM_OUTERMOST[order] for order in (pins.order or ORDERS[0], *ORDERS)}
    for order, axes in laid.items():
        right = [name for name in axes if name in names]
        ranks = mesh.mesh.permute([names.index(name) for name in right]).flatten().tolist()
        if ranks != list(range(len(ranks))):
            continue
        if pins.order not in (None, order):
            raise UsageError(
                f"the pins say order={pins.order}, the DeviceMesh with dims {tuple(names)} lays "
                f"ranks out as order={order}",
                next_step="leave it out of the pins, or change the mesh",
            )
        sizes = dict(zip(names, mesh.shape, strict=True))
        several = sizes.get("pp", 1) > 1 and any(
            sizes.get(name, 1) > 1 for name in ("dp", REPLICATE, SHARD)
        )
        return order if several else pins.order
    right = [name for name in laid[ORDERS[0]] if name in names]
    raise UsageError(
        f"DeviceMesh dims {tuple(names)} lay ranks out as {mesh.mesh.tolist()}: plans have "
        f"neighbouring ranks in {right[-1]}",
        next_step=f"init_device_mesh with mesh_dim_names={tuple(right)}, in that order",
    )


def _whole_dp(degrees: Mapping[str, int]) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """The same with one dp in place of dp_replicate and dp_shard, and the pins that these two make:
    over how many ranks ZeRO shards (cp ranks hold shards too), or none where all are copies."""
    if not {REPLICATE, SHARD} & set(degrees) or "dp" in degrees:
        return degrees, {}
    rest = {name: size for name, size in degrees.items() if name not in (REPLICATE, SHARD)}
    shard, copies = degrees.get(SHARD, 1), degrees.get(REPLICATE, 1)
    ranks = shard * degrees.get("cp", 1)
    sharding = {}
    if ranks > 1 and (copies > 1 or SHARD in degrees):
        sharding = {"shard": ranks}
    elif copies > 1:
        sharding = {"zero": 0}
    return {**rest, "dp": copies * shard}, sharding


def local_cluster(size: int, device_type: str) -> Cluster:
    """A cluster description of the ranks that torchrun started."""
    if device_type != "cuda":
        return Cluster.parse(f"cpu:{size}")
    device = known_device_name()
    if device is None:
        raise UsageError(
            f"no built-in data for the device {torch.cuda.get_device_name()!r}",
            next_step="measure it: torchrun ... -m autopar profile --out cluster.toml; then pass "
            "mesh=Cluster.parse('cluster.toml')",
        )
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return Cluster.parse(f"{device}:{size // local}x{local}")


def known_device_name() -> str | None:
    """The device file of this process's GPU, None when there is none."""
    name = torch.cuda.get_device_name().lower()
    known = ("gb200", "b300", "h800", "h200", "h100", "b200", "a100", "v100")
    device = next((k for k in known if k in name), None)
    memory = torch.cuda.get_device_properties(0).total_memory
    if device == "a100":
        return "a100-80" if memory > 50 * 2**30 else "a100-40"
    if device == "v100":
        return "v100-32" if memory > 20 * 2**30 else "v100-16"
    return device
