"""The outer search space: every mesh, micro-batch, schedule and ZeRO level that is legal here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence

from autopar.block_cost import CostProvider
from autopar.cluster import Cluster
from autopar.cost.setting import Setting
from autopar.mesh import Mesh
from autopar.search.options import SearchOptions, stage_starts

# More micro-batch sizes than this are thinned out to powers of two.
FEW = 12


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    return sorted({*small, *(number // i for i in small)})


def microbatch_sizes(samples: int, allowed: Container[int]) -> list[int]:
    """Allowed sizes that divide the `samples` of one dp rank: all if few, else powers of two."""
    every = [d for d in divisors(samples) if d in allowed]
    return every if len(every) <= FEW else [d for d in every if d & (d - 1) == 0]


def legal_degrees(provider: CostProvider, cluster: Cluster) -> list[int]:
    """The tp degrees of the model that divide the cluster."""
    return [d for d in provider.tp_degrees(cluster.size) if cluster.size % d == 0]


def settings(
    provider: CostProvider, cluster: Cluster, options: SearchOptions, tp_degrees: Sequence[int]
) -> tuple[list[Setting], list[str]]:
    """All configurations that the pins leave, and notes on what was left out and why."""
    found: list[Setting] = []
    left_out: Counter[str] = Counter()
    pins, names = options.pins, provider.block_names
    allowed = set(provider.microbatch_sizes(options.global_batch))
    starts = stage_starts(pins, names)
    stages = pins.pp if starts is None else len(starts)
    for tp in tp_degrees:
        if cluster.size % tp or pins.tp not in (None, tp):
            continue
        for pp in divisors(cluster.size // tp):
            dp = cluster.size // tp // pp
            mesh = Mesh(pp, dp, tp)
            if stages not in (None, pp) or pins.dp not in (None, dp):
                continue
            if pp > len(names):
                left_out[f"more stages than the {len(names)} blocks"] += 1
            elif options.global_batch % dp:
                left_out[f"global batch {options.global_batch} does not divide over dp"] += 1
            else:
                found += _of_mesh(mesh, cluster, options, allowed, left_out)
    notes = [f"left out {count} x: {reason}" for reason, count in sorted(left_out.items())]
    return found, notes


def _of_mesh(
    mesh: Mesh,
    cluster: Cluster,
    options: SearchOptions,
    allowed: Container[int],
    left_out: Counter[str],
) -> list[Setting]:
    """Micro-batches, schedule and ZeRO levels of one mesh."""
    pins, samples = options.pins, options.global_batch // mesh.dp
    if pins.microbatch is not None:
        sizes = [pins.microbatch] if samples % pins.microbatch == 0 else []
    elif pins.microbatches is not None:
        exact = samples % pins.microbatches == 0
        sizes = [samples // pins.microbatches] if exact else []
    else:
        sizes = microbatch_sizes(samples, allowed)
        if not sizes:
            left_out["no micro-batch size of the captured model divides the batch"] += 1
        elif len(sizes) < sum(d in allowed for d in divisors(samples)):
            left_out["micro-batch sizes that are not powers of two (many divisors)"] += 1
    found = []
    for size in sizes:
        count = samples // size
        if pins.microbatches not in (None, count):
            continue
        if size not in allowed:
            left_out["the model was captured with another, fixed batch size"] += 1
            continue
        schedule = _schedule(mesh, count, pins.schedule, left_out)
        if schedule is None:
            continue
        for zero in _zero_levels(mesh, pins.zero):
            found.append(
                Setting(
                    cluster, mesh, size, count, schedule, zero, options.precision, options.optimizer
                )
            )
    return found


def _schedule(
    mesh: Mesh, microbatches: int, pinned: str | None, left_out: Counter[str]
) -> str | None:
    """1F1B where it is legal: GPipe takes the same time and never less memory."""
    if microbatches >= mesh.pp:
        return pinned or "1f1b"
    # torch.distributed.pipelining.Schedule1F1B raises on fewer micro-batches than stages.
    if pinned == "1f1b":
        left_out["1f1b needs at least as many micro-batches as stages (torch Schedule1F1B)"] += 1
        return None
    return "gpipe"


def _zero_levels(mesh: Mesh, pinned: int | None) -> tuple[int, ...]:
    """One data-parallel rank has nothing to shard: all levels are the same there."""
    if pinned is not None:
        return (pinned,)
    return (0,) if mesh.dp == 1 else (0, 1, 2, 3)
