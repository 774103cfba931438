"""The outer search space: every mesh, micro-batch, schedule and ZeRO level that is legal here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from math import gcd

from autopar import zero_bubble
from autopar.block_cost import CostProvider, ExpertProvider, SequenceProvider
from autopar.cluster import Cluster
from autopar.cost.collective import group_levels
from autopar.cost.setting import Setting
from autopar.interleaving import CHUNKED, DIVIDED, LOOPED, V_SHAPED, chunks_refused, refused
from autopar.mesh import ORDERS, REPLICA, Mesh, order_refused
from autopar.search.options import Pins, SearchOptions, cut_ranks, stage_starts
from autopar.search.recompute_pin import recomputes
from autopar.search.reshard_pin import needs_resharding

# More micro-batch sizes than this are thinned out to powers of two.
FEW = 12
# The free search tries no more chunks; a pin may ask for more. Each chunk more saves less of the
# bubble, (p-1)/(vm+p-1), and sends as much again.
MOST_CHUNKS = 8
# Of so many blocks with parameters every number of chunks is tried, with every ZeRO level.
FEW_BLOCKS = 24
UNEVEN = "numbers of chunks that split unevenly, but on the mesh of the plan"
# The free search splits sequences so that every rank keeps as many positions: with fewer the
# messages of attention are long beside its arithmetic, and dp does the same without them.
LEAST_POSITIONS = 4096


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


def cp_degrees(provider: CostProvider, cluster: Cluster) -> list[int]:
    """The cp degrees of the model that divide the cluster."""
    if not isinstance(provider, SequenceProvider):
        return [1]
    return [d for d in provider.cp_degrees(cluster.size) if cluster.size % d == 0]


def long_degrees(provider: CostProvider, cluster: Cluster) -> list[int]:
    """Those above 1 that the free search tries: they leave every rank a long part of a sequence."""
    if not isinstance(provider, SequenceProvider):
        return []
    most = provider.sequence // LEAST_POSITIONS
    return [d for d in cp_degrees(provider, cluster) if 1 < d <= most]


def ep_degrees(provider: CostProvider, replicas: int) -> list[int]:
    """Over how many of `replicas` ranks the experts of every layer can be split."""
    if not isinstance(provider, ExpertProvider):
        return [1]
    return divisors(gcd(replicas, provider.experts))


def settings(
    provider: CostProvider, cluster: Cluster, options: SearchOptions, tp_degrees: Sequence[int]
) -> tuple[list[Setting], list[str]]:
    """All configurations that the pins leave, and notes on what was left out and why."""
    found: list[Setting] = []
    left_out: Counter[str] = Counter()
    pins, names = options.pins, provider.block_names
    allowed = set(provider.microbatch_sizes(options.global_batch))
    free_cp = [1, *(long_degrees(provider, cluster) if pins.cp is None else [])]
    starts = stage_starts(pins, names)
    stages = cut_ranks(pins, starts)
    held = provider.holds_parameters
    # The runtime's pipeline needs a parameter on every stage.
    most = max(1, sum(held))
    what = f"{len(names)} blocks" if all(held) else f"{most} of {len(names)} blocks with parameters"
    inner = [(cp, tp) for cp in (free_cp if pins.cp is None else [pins.cp]) for tp in tp_degrees]
    for cp, tp in inner:
        if cluster.size % (cp * tp) or pins.tp not in (None, tp):
            continue
        for pp in divisors(cluster.size // (cp * tp)):
            dp = cluster.size // (cp * tp) // pp
            if stages not in (None, pp) or pins.dp not in (None, dp):
                continue
            if pp > most:
                left_out[f"more stages than the {what}"] += 1
            elif starts is not None and not _all_hold(starts, held):
                left_out["a stage of the given cuts holds no parameter, as every one needs"] += 1
            elif options.global_batch % dp:
                left_out[f"global batch {options.global_batch} does not divide over dp"] += 1
            else:
                for ep in ep_degrees(provider, dp * cp):
                    if pins.ep not in (None, ep):
                        continue
                    for mesh in orders(Mesh(pp, dp, tp, cp, ep), cluster, pins.order):
                        found += _of_mesh(mesh, cluster, options, allowed, (most, what), left_out)
    notes = [f"left out {count} x: {reason}" for reason, count in sorted(left_out.items())]
    if not all(held) and any(s.mesh.pp > 1 for s in found):
        alone = ", ".join(n for n, holds in zip(names, held, strict=True) if not holds)
        notes.append(f"no stage holds only {alone}: a pipeline stage needs a parameter")
    return found, notes


def uneven_chunks(found: Sequence[Setting], mesh: Mesh, provider: CostProvider) -> list[Setting]:
    """The settings of `found` on the ranks of `mesh` with the numbers of chunks that were left out
    for splitting the blocks unevenly."""
    here = [s for s in found if s.mesh.shape == mesh.shape]
    here = [s for s in here if s.schedule in LOOPED and s.chunks > 1]
    most = min(MOST_CHUNKS, max(1, sum(provider.holds_parameters)) // mesh.pp)
    others = sorted(set(range(2, most + 1)) - {s.chunks for s in here})
    alike = {(s.mesh, s.microbatch, s.schedule, s.zero): s for s in here}
    return [replace(s, chunks=count) for s in alike.values() for count in others]


def orders(mesh: Mesh, cluster: Cluster, pinned: str | None) -> list[Mesh]:
    """A mesh of these degrees in every order that makes a difference on the links; the usual one
    first. With cp above 1 there is that alone: replicas would not be at even distances."""
    mesh, other = (replace(mesh, order=order) for order in ORDERS)
    if mesh.pp == 1 or mesh.dp == 1:
        return [mesh]
    if pinned is not None:
        return [] if order_refused(pinned, mesh.cp) else [replace(mesh, order=pinned)]
    if order_refused(other.order, mesh.cp):
        return [mesh]
    return [mesh] if _links(mesh, cluster) == _links(other, cluster) else [mesh, other]


def _links(mesh: Mesh, cluster: Cluster) -> list[object]:
    """What the groups that an order moves have of the links: of stages, replicas, and parts of
    these of every size."""
    groups: list[object] = [group_levels(cluster.links, mesh.pp, mesh.stride("pp"))]
    step = mesh.stride(REPLICA)
    for size in divisors(mesh.replicas)[1:]:
        groups.append(group_levels(cluster.links, size, step))
        groups.append(group_levels(cluster.links, mesh.replicas // size, step * size))
    return groups


def _all_hold(starts: Sequence[int], held: Sequence[bool]) -> bool:
    """Whether every stage of given first blocks has a block that holds a parameter."""
    edges = [*starts, len(held)]
    return len(starts) == 1 or all(any(held[a:b]) for a, b in zip(edges, edges[1:], strict=False))


def _of_mesh(
    mesh: Mesh,
    cluster: Cluster,
    options: SearchOptions,
    allowed: Container[int],
    most: tuple[int, str],
    left_out: Counter[str],
) -> list[Setting]:
    """Micro-batches, schedule and ZeRO levels of one mesh. `most`: parts that the chain can be cut
    into, and of what there are as many."""
    pins, samples = options.pins, options.global_batch // mesh.dp
    if pins.microbatch is not None:
        sizes = [pins.microbatch] if samples % pins.microbatch == 0 else []
        if not sizes:
            reason = f"microbatch={pins.microbatch} does not divide the {samples} samples of a dp"
            left_out[f"{reason} rank"] += 1
    elif pins.microbatches is not None:
        exact = samples % pins.microbatches == 0
        sizes = [samples // pins.microbatches] if exact else []
        if not sizes:
            reason = f"the {samples} samples of a dp rank make no {pins.microbatches} micro-batches"
            left_out[reason] += 1
    else:
        sizes = microbatch_sizes(samples, allowed)
        if mesh.cp > 1 and pins.cp is None and len(sizes) > 1:
            # More samples at once would rather be spread over dp.
            left_out["larger micro-batches with cp (they can be pinned with it)"] += 1
            sizes = sizes[:1]
        if not sizes:
            left_out["no micro-batch size of the captured model divides the batch"] += 1
        elif mesh.cp == 1 and len(sizes) < sum(d in allowed for d in divisors(samples)):
            left_out["micro-batch sizes that are not powers of two (many divisors)"] += 1
    found = []
    for size in sizes:
        count = samples // size
        if pins.microbatches not in (None, count):
            continue
        if size not in allowed:
            left_out["the model was captured with another, fixed batch size"] += 1
            continue
        kinds = [(s, 1) for s in _schedule(mesh, count, pins, left_out)]
        kinds += _in_turns(mesh, count, pins, most, left_out)
        given = options.precision, options.optimizer
        found += [
            Setting(cluster, sharded, size, count, schedule, zero, *given, chunks)
            for schedule, chunks in kinds
            for zero in _zero_levels(mesh, pins, chunks, most[0], left_out)
            if schedule not in DIVIDED or zero in zero_bubble.ZERO_LEVELS
            for sharded in _sharded(mesh, zero, pins, left_out)
        ]
    return found


def _sharded(mesh: Mesh, zero: int, pins: Pins, left_out: Counter[str]) -> Iterator[Mesh]:
    """The mesh with every number of ranks that ZeRO may shard over: any divisor of the replicas.

    With ep, whose experts are sharded over all ranks that hold them in any case, only if pinned.
    """
    whole = zero == 0 or mesh.replicas == 1
    if pins.shard is None and (whole or mesh.ep > 1):
        if not whole:
            left_out["hybrid sharding with ep (it can be pinned)"] += 1
        yield mesh
    elif whole or mesh.replicas % (pins.shard or 1):
        what = "ZeRO-0 shards nothing" if zero == 0 else f"must divide {mesh.replicas} replicas"
        left_out[f"shard={pins.shard}: {what}"] += 1
    else:
        for degree in [pins.shard] if pins.shard else divisors(mesh.replicas)[1:]:
            yield replace(mesh, dp_replicate=mesh.replicas // degree)


def _schedule(mesh: Mesh, microbatches: int, pins: Pins, left_out: Counter[str]) -> list[str]:
    """1F1B where it is legal: GPipe takes the same time and never less memory."""
    if pins.schedule in CHUNKED or (pins.chunks or 1) > 1:
        return []
    if microbatches >= mesh.pp:
        return [pins.schedule or "1f1b"]
    # torch.distributed.pipelining.Schedule1F1B raises on fewer micro-batches than stages.
    if pins.schedule == "1f1b":
        left_out["1f1b needs at least as many micro-batches as stages (torch Schedule1F1B)"] += 1
        return []
    return ["gpipe"]


def _in_turns(
    mesh: Mesh, microbatches: int, pins: Pins, most: tuple[int, str], left_out: Counter[str]
) -> list[tuple[str, int]]:
    """The schedules in which parts of the chain take turns, each with every number of chunks that a
    pp rank may have."""
    found = [s for s in CHUNKED if pins.schedule in (None, s)]
    # Chunks are never kept gathered.
    if not found or (needs_resharding(pins) and pins.reshard != "all"):
        return []
    if mesh.pp == 1:
        if pins.schedule is not None:
            left_out[f"schedule={pins.schedule}: {chunks_refused(found[0], 2, 1)}"] += 1
        return []
    if microbatches == 1:
        left_out["one micro-batch has nothing to interleave with"] += 1
        return []
    divided = [s for s in found if s in DIVIDED]
    reason = zero_bubble.refused(ep=mesh.ep, recomputes=recomputes(pins))
    if divided and reason:
        left_out[f"{' and '.join(divided)}: {reason}"] += 1
        found = [s for s in found if s not in DIVIDED]
    looped = [s for s in found if s in LOOPED]
    if looped and (reason := refused(mesh.pp, microbatches)):
        left_out[f"{pins.schedule or 'interleaved'}: {reason}"] += 1
        looped = []
    counts = _chunks(mesh, pins, most, left_out) if looped else []
    kinds = [(s, c) for s in looped for c in counts if not chunks_refused(s, c, mesh.pp)]
    return kinds + [(s, 2) for s in found if s in V_SHAPED and _turns(mesh, pins, most, left_out)]


def _turns(mesh: Mesh, pins: Pins, most: tuple[int, str], left_out: Counter[str]) -> bool:
    """Whether the chain can go over the ranks and back."""
    if pins.chunks not in (None, 2) or (pins.cuts is not None and pins.chunks is None):
        return False
    if most[0] < 2 * mesh.pp:
        left_out[f"two chunks for each pp rank are more stages than the {most[1]}"] += 1
    return most[0] >= 2 * mesh.pp


def _chunks(mesh: Mesh, pins: Pins, most: tuple[int, str], left_out: Counter[str]) -> list[int]:
    """How many chunks each pp rank may have."""
    if pins.cuts is not None and pins.chunks is None:
        return [1]
    fit = most[0] // mesh.pp
    if pins.chunks is not None:
        if pins.chunks > fit:
            left_out[f"more stages than the {most[1]}"] += 1
        return [pins.chunks] if pins.chunks <= fit else []
    # As many chunks as blocks allow of 1, 2, ... each: numbers between these split unevenly.
    every = range(1, fit + 1)
    full = set(every) if most[0] <= FEW_BLOCKS else {fit // size for size in every}
    if fit > MOST_CHUNKS:
        left_out[f"more than {MOST_CHUNKS} chunks per pp rank (they can be pinned)"] += 1
    if fit > len(full):
        left_out[f"{UNEVEN} (they can be pinned)"] += 1
    return sorted(count for count in full if count <= MOST_CHUNKS)


def _zero_levels(
    mesh: Mesh, pins: Pins, chunks: int, blocks: int, left_out: Counter[str]
) -> tuple[int, ...]:
    """One data-parallel rank has nothing to shard: all levels are the same there.

    2 and 3 scatter or gather every part again for every micro-batch, as many times as there are
    chunks: the free search interleaves without them, but for models of few blocks.
    """
    if needs_resharding(pins) and mesh.replicas == 1:
        left_out["reshard is pinned, and one replica has nothing to gather"] += 1
        return ()
    if needs_resharding(pins):
        return (3,) if pins.zero in (None, 3) else ()
    if pins.zero is not None:
        return (pins.zero,)
    if mesh.replicas == 1:
        return (0,)
    pinned = pins.chunks is not None or pins.schedule is not None
    if chunks == 1 or pinned or blocks <= FEW_BLOCKS:
        return (0, 1, 2, 3)
    left_out["ZeRO-2 and 3 with more than one chunk (they can be pinned)"] += 1
    return (0, 1)
