"""This process's place in the mesh: the process groups of the axes, and how ranks fail together."""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.errors import PlanError, RuntimeFault
from autopar.mesh import AXES, EP, EXPERT_REPLICA, REPLICA, REPLICATE, SHARD, Mesh
from autopar.runtime.torch_compat import flat_mesh, quiet_redistribution, set_timeout
from autopar.stage_program import ParameterSpec

# Any: torch does not list its stores among what it exports.
torch_distributed: Any = dist


@dataclass(frozen=True)
class Ranks:
    """The mesh as this rank sees it. `replicas`: its dp and cp axes as one, the ranks that hold the
    same tp slice of the parameters; `shards`: those as ZeRO sees them, over some of which it shards
    under hybrid sharding (a mesh of dp_replicate and dp_shard); `tp`: the axis on which parameters
    are sliced; `experts`: the axes of parameters that ep splits (pp, the ranks that hold the same
    experts, ep, tp); `control`: the group for small messages on the CPU."""

    mesh: Mesh
    rank: int
    device: torch.device
    device_mesh: DeviceMesh
    replicas: DeviceMesh
    shards: DeviceMesh
    tp: DeviceMesh
    experts: DeviceMesh
    control: dist.ProcessGroup
    wait: datetime.timedelta
    tied: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)

    @staticmethod
    def create(mesh: Mesh, *, device: str | None = None, timeout_seconds: float = 60.0) -> Ranks:
        """Check the world size, start the process group if there is none, and make the mesh.

        `device` is "cuda" or "cpu" (default: cuda when available). A wait that is longer than
        `timeout_seconds` is an error. Raises `PlanError` on every rank, before any communication,
        when the number of ranks is not that of the mesh.
        """
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        _check_world_size(mesh)
        here = torch.device(kind)
        if kind == "cuda":
            here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(here)
        wait = datetime.timedelta(seconds=timeout_seconds)
        _start(kind, wait)
        device_mesh = _mesh_of(mesh, kind, mesh.axes)
        replicas = device_mesh["dp"]
        if mesh.cp > 1:
            replicas = flat_mesh(device_mesh, ("dp", "cp"), REPLICA)
        experts = device_mesh
        groups = [*(device_mesh.get_group(axis) for axis in AXES), replicas.get_group()]
        shards, tp = replicas, device_mesh["tp"]
        if mesh.dp_replicate > 1:
            # FSDP2 wants its mesh and that of a parameter to be parts of one.
            hybrid = _mesh_of(mesh, kind, _with_replicas_as(mesh, REPLICATE, SHARD))
            shards, tp = hybrid[REPLICATE, SHARD], hybrid["tp"]
            groups += hybrid.get_all_groups()
        if mesh.ep > 1:
            experts = _mesh_of(mesh, kind, _with_replicas_as(mesh, EXPERT_REPLICA, EP))
            groups += experts.get_all_groups()
        for group in groups:
            set_timeout(group, wait)
        quiet_redistribution()
        world = dist.group.WORLD
        assert world is not None
        control = dist.new_group(backend="gloo", timeout=wait) if kind == "cuda" else world
        assert control is not None
        meshes = device_mesh, replicas, shards, tp, experts
        return Ranks(mesh, dist.get_rank(), here, *meshes, control, wait)

    def index(self, axis: str) -> int:
        if axis == EP:
            return self.mesh.replica(self.rank) % self.mesh.ep
        return self.mesh.coordinates(self.rank)[axis]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The group of the ranks that differ from this one in `axis` only."""
        return (self.experts if axis in (EP, EXPERT_REPLICA) else self.device_mesh).get_group(axis)

    def group_names(self) -> dict[str, str]:
        """By which name torch knows the group of each axis that graphs name."""
        axes = ("dp", "cp", "tp", EP) if self.mesh.ep > 1 else ("dp", "cp", "tp")
        return {axis: self.group(axis).group_name for axis in axes}

    def replicas_of(self, spec: ParameterSpec) -> DeviceMesh:
        """The ranks that hold the same part of a parameter."""
        return self.experts[EXPERT_REPLICA] if spec.over_ep else self.replicas

    def make_tied_groups(
        self, stage_sets: Iterable[tuple[int, ...]], pp_rank: Callable[[int], int]
    ) -> None:
        """Groups over which gradients of parameters tied across stages are summed.

        Every rank has to call this with the same sets of stage indices; `pp_rank` tells which rank
        holds a stage, and holds at most one of a set.
        """
        for stages in sorted({s for s in stage_sets if len(s) > 1}):
            holders = sorted(map(pp_rank, stages))
            for place in range(self.mesh.size):
                here = self.mesh.coordinates(place)
                if here["pp"]:  # one of the first stage is enough for the others' ranks
                    continue
                members = [self.mesh.rank(**{**here, "pp": pp}) for pp in holders]
                group = dist.new_group(members, timeout=self.wait)
                if self.rank in members:
                    assert group is not None
                    self.tied[stages] = group


def _with_replicas_as(mesh: Mesh, outer: str, inner: str) -> tuple[str, ...]:
    """The axes of a mesh with its replicas divided in two, which lie where dp and cp do."""
    found = [axis for axis in mesh.axes if axis != "cp"]
    place = found.index("dp")
    return (*found[:place], outer, inner, *found[place + 1 :])


def _mesh_of(mesh: Mesh, kind: str, axes: tuple[str, ...]) -> DeviceMesh:
    sizes = tuple(mesh.degree(axis) for axis in axes)
    return init_device_mesh(kind, sizes, mesh_dim_names=axes)


def _check_world_size(mesh: Mesh) -> None:
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    if world != mesh.size:
        raise PlanError(
            f"the plan's mesh ({mesh}) has {mesh.size} ranks, but {world} are running",
            next_step=f"start {mesh.size} ranks, for example torchrun --nproc-per-node "
            f"{mesh.size}, or plan for {world}",
        )


def _start(kind: str, wait: datetime.timedelta) -> None:
    if dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=wait)
    else:
        # One rank without torchrun: a store in this process is enough.
        store = torch_distributed.HashStore()
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=wait)


def together(
    ranks: Ranks, error: Exception | None, amounts: tuple[float, ...] = ()
) -> tuple[float, ...]:
    """Let all ranks go on, or fail, together; returns the sums of `amounts` over all ranks.

    Every rank calls this with its own error, or None. If any has one, every rank raises within
    seconds: its own error, or a `RuntimeFault` that tells the others'.
    """
    with unset_fake_temporarily():  # what ranks tell each other is real, also in a dry run
        numbers = torch.tensor([float(error is not None), *amounts], dtype=torch.float64)
        dist.all_reduce(numbers, group=ranks.control)
        if not numbers[0]:
            return tuple(numbers[1:].tolist())
        texts: list[Any] = [None] * ranks.mesh.size
        text = f"{type(error).__name__}: {error}" if error is not None else None
        dist.all_gather_object(texts, text, group=ranks.control)
    if error is not None:
        raise error
    failed = [rank for rank, found in enumerate(texts) if found is not None]
    raise RuntimeFault(f"rank {failed[0]} (of {len(failed)} that failed): {texts[failed[0]]}")


def agree(ranks: Ranks, fingerprint_text: str, weights: str = "") -> None:
    """Raise `RuntimeFault` on every rank unless all hold the same plan, program and `weights`."""
    digest = hashlib.sha256(fingerprint_text.encode()).hexdigest()[:16]
    found: list[Any] = [None] * ranks.mesh.size
    dist.all_gather_object(found, (digest, weights), group=ranks.control)
    digests, of_weights = zip(*found, strict=True)
    _same(
        digests,
        "another plan or program",
        "give every rank the same model, plan and library versions",
    )
    _same(
        of_weights,
        "other weights",
        "seed every rank alike before the model is made (torch.manual_seed), load the same "
        "checkpoint on all, or make the model on the meta device",
    )


def _same(found: tuple[str, ...], what: str, next_step: str) -> None:
    differ = [rank for rank, text in enumerate(found) if text != found[0]]
    if differ:
        raise RuntimeFault(
            f"ranks {differ} hold {what} than rank 0 ({', '.join(sorted(set(found)))})",
            next_step=next_step,
        )


def check_batches(ranks: Ranks, own: int, sums: tuple[float, ...]) -> None:
    """Raise `RuntimeFault` on every rank unless the ranks of each dp part have the same rows.

    `sums`: over all ranks of what `batch_amounts` gave, so that all come to the same answer.
    """
    members = ranks.mesh.size // ranks.mesh.dp
    pairs = zip(sums[::2], sums[1::2], strict=True)
    if all(one * one == members * square for one, square in pairs):
        return
    with unset_fake_temporarily():
        found: list[Any] = [None] * ranks.mesh.size
        dist.all_gather_object(found, own, group=ranks.control)
    by_part: dict[int, dict[int, int]] = {}
    for rank, digest in enumerate(found):
        by_part.setdefault(ranks.mesh.coordinates(rank)["dp"], {})[rank] = digest
    part, held = next((p, h) for p, h in by_part.items() if len(set(h.values())) > 1)
    first = next(iter(held.values()))
    raise RuntimeFault(
        f"ranks {[r for r, d in held.items() if d != first]} have another batch than rank "
        f"{next(iter(held))}, though all work on the same rows (part {part} of dp={ranks.mesh.dp})",
        next_step="give every rank the same global batch, or all ranks of a dp part its rows: "
        "seed the data loader's shuffling alike",
    )


def batch_amounts(ranks: Ranks, digest: int) -> tuple[float, ...]:
    """This rank's digest and its square in the place of its dp part: equal digests are told from
    others by the sums alone."""
    amounts = [0.0] * (2 * ranks.mesh.dp)
    part = ranks.index("dp")
    amounts[2 * part], amounts[2 * part + 1] = float(digest), float(digest * digest)
    return tuple(amounts)
