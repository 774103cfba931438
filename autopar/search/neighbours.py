"""The plan's nearest neighbours: one decision changed, everything else kept, evaluated.

Cuts, placements and (but for the two neighbours that are about it) recomputation are chosen anew,
since they follow from the other decisions: what is reported is the best plan with that one change.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from autopar.cluster import Cluster
from autopar.interleaving import CHUNKED, DIVIDED, ONE_CHUNK, chunks_refused
from autopar.mesh import ORDERS
from autopar.search.best_first import BestFirst
from autopar.search.options import Pins, SearchOptions
from autopar.search.prices import Prices
from autopar.search.result import Choice, Neighbour
from autopar.search.smallest_memory import smallest_memory
from autopar.search.space import (
    divisors,
    ep_degrees,
    legal_degrees,
    long_degrees,
    orders,
    settings,
)
from autopar.units import format_bytes
from autopar.zero_bubble import refused


@dataclass(frozen=True)
class _Change:
    """One decision: what a person calls the change, and the pins that make it."""

    name: str
    pins: Pins


def neighbours(
    prices: Prices, best: Choice, cluster: Cluster, options: SearchOptions, limit: int
) -> tuple[Neighbour, ...]:
    """The best plan for every single change that is legal and that the pins leave open. With a time
    limit of the search no more of them are begun once they took as long."""
    degrees, begin = legal_degrees(prices.provider, cluster), time.perf_counter()
    found = []
    on_cp = [1, *long_degrees(prices.provider, cluster)]
    on_ep = ep_degrees(prices.provider, best.mesh.replicas)
    blocks = len(prices.provider.block_names)
    if options.pins.reshard == "auto":
        # That keeps nothing from being changed.
        options = replace(options, pins=options.pins.without("reshard"))
    for change in _changes(best, cluster, degrees, on_cp, on_ep, blocks):
        if options.pins.reshard and change.pins.reshard == "auto":
            change = replace(change, pins=change.pins.without("reshard"))
        change = _runnable(change)
        if not _open(options.pins, change.pins):
            continue
        if options.time_limit is not None and time.perf_counter() - begin > options.time_limit:
            found.append(Neighbour(change.name, None, None, "not solved within the time limit"))
            continue
        pins = replace(options.pins, **_given(change.pins))
        here = replace(options, pins=pins)
        legal, notes = settings(prices.provider, cluster, here, degrees)
        if not legal and _moves(change, best):
            # The samples of a replica are others: the micro-batch follows from them.
            here = replace(here, pins=replace(pins, microbatch=options.pins.microbatch))
            legal, notes = settings(prices.provider, cluster, here, degrees)
        if not legal:
            reason = "; ".join(note.partition(" x: ")[2] for note in notes)
            if reason and options.pins == options.forced:
                found.append(Neighbour(change.name, None, None, reason))
            continue
        state = BestFirst(prices, legal, here, limit)
        state.run(None, None)
        if state.best is not None:
            found.append(Neighbour(change.name, True, state.best))
            continue
        smallest = smallest_memory(prices, legal, here)
        if smallest is not None:
            need = format_bytes(max(smallest.peaks))
            reason = f"needs {need} of {format_bytes(limit)}"
            found.append(Neighbour(change.name, False, None, reason))
    return (*found, *_no_wider_tp(best, cluster, options.pins, degrees))


def _moves(change: _Change, best: Choice) -> bool:
    """Whether it gives the replicas of the plan another number of ranks."""
    pins, mesh = change.pins, best.mesh
    return (pins.tp, pins.pp, pins.cp) != (mesh.tp, mesh.pp, mesh.cp)


def _no_wider_tp(
    best: Choice, cluster: Cluster, pins: Pins, degrees: list[int]
) -> Iterator[Neighbour]:
    """Why tp is no wider, where the model has no wider one."""
    wider = [d for d in divisors(cluster.size) if d > best.mesh.tp]
    if pins.tp is None and wider and not any(d > best.mesh.tp for d in degrees):
        reason = f"no matrix product of the model splits over {wider[0]} ranks"
        yield Neighbour(f"TP {wider[0]}", None, None, reason)


def _changes(
    best: Choice,
    cluster: Cluster,
    degrees: list[int],
    on_cp: list[int],
    on_ep: list[int],
    blocks: int,
) -> Iterator[_Change]:
    mesh = best.mesh
    kept = Pins(
        tp=mesh.tp,
        pp=mesh.pp,
        cp=mesh.cp,
        ep=mesh.ep if len(on_ep) > 1 else None,
        zero=best.zero if mesh.replicas > 1 else None,
        shard=_shard(best),
        reshard="auto" if best.keep_label else None,
        microbatch=best.microbatch,
        schedule=best.schedule if mesh.pp > 1 else None,
        chunks=best.chunks if mesh.pp > 1 else None,
        boundary=best.boundary if mesh.tp > 1 else None,
        order=mesh.order if len(orders(mesh.shape, cluster, None)) > 1 else None,
    )
    # What another mesh can't keep follows from it.
    same = {"ep": None, "zero": None, "shard": None, "schedule": None, "chunks": None}
    moved = replace(kept, **same, boundary=None, order=None)
    for tp in _beside(degrees, mesh.tp):
        if cluster.size % (tp * mesh.pp * mesh.cp) == 0:
            yield _Change(f"TP {tp}", replace(moved, tp=tp, zero=_level(best, mesh.pp * tp)))
    for cp in _beside(on_cp, mesh.cp):
        if cluster.size % (cp * mesh.pp * mesh.tp) == 0:
            level = _level(best, mesh.pp * mesh.tp)
            # The micro-batch of the whole sequence may be too large to keep, or too small.
            yield _Change(f"CP {cp}", replace(moved, cp=cp, zero=level, microbatch=None))
    for pp in _beside(divisors(cluster.size // (mesh.tp * mesh.cp)), mesh.pp):
        if pp <= blocks:
            pins = replace(moved, pp=pp, zero=_level(best, pp * mesh.tp), boundary=kept.boundary)
            yield _Change(f"PP {pp}", pins)
    for ep in _beside(on_ep, mesh.ep):
        yield _Change(f"EP {ep}", replace(kept, ep=ep, shard=None))
    if mesh.replicas > 1:
        yield from _sharding(best, kept)
    if kept.order:
        other = next(order for order in ORDERS if order != kept.order)
        outer = replace(mesh, order=other).axes[0].upper()
        yield _Change(f"{outer} outermost", replace(kept, order=other))
    samples = best.microbatch * best.microbatches
    for size in (best.microbatch // 2, 2 * best.microbatch):
        if size and samples % size == 0:
            pins = replace(kept, microbatch=size, schedule=None, chunks=None)
            yield _Change(f"micro-batch of {size}", pins)
    for recompute in ("none", "full"):
        if best.recompute_label != recompute:
            text = "no recomputation" if recompute == "none" else "full recomputation"
            yield _Change(text, replace(kept, recompute=recompute))
    if mesh.pp > 1:
        yield from _schedules(best, kept, blocks)
    if mesh.tp > 1:
        yield _other_boundary(best, kept)


def _other_boundary(best: Choice, kept: Pins) -> _Change:
    """Values between blocks split over the sequence, or whole."""
    if best.boundary == "R":
        return _Change("sequence parallelism", replace(kept, boundary="S(1)"))
    return _Change("no sequence parallelism", replace(kept, boundary="R"))


def _shard(best: Choice) -> int | None:
    """Over how many ranks the plan shards, where another number could be pinned."""
    mesh = best.mesh
    return mesh.dp_shard if best.zero and mesh.replicas > 1 and mesh.ep == 1 else None


def _sharding(best: Choice, kept: Pins) -> Iterator[_Change]:
    """ZeRO levels, and over more or fewer ranks."""
    for zero in _beside([0, 1, 2, 3], best.zero):
        yield _Change(f"ZeRO-{zero}", replace(kept, zero=zero, shard=kept.shard if zero else None))
    if best.keep_label:
        yield _Change("all blocks resharded", replace(kept, reshard="all"))
    if kept.shard:
        for shard in _beside(divisors(best.mesh.replicas)[1:], kept.shard):
            yield _Change(f"shard over {shard}", replace(kept, shard=shard))


def _schedules(best: Choice, kept: Pins, blocks: int) -> Iterator[_Change]:
    """GPipe or 1F1B, and with more or fewer chunks (of a plan without any: the best number of
    them), with divided backwards or without."""
    few = best.microbatches < best.mesh.pp  # which 1F1B does not take
    other = "gpipe" if best.schedule == "1f1b" or few else "1f1b"
    if other != best.schedule:
        yield _Change(f"schedule {other}", replace(kept, schedule=other, chunks=1))
    fit = blocks // best.mesh.pp
    for other in CHUNKED:
        if other != best.schedule and (fit > 1 or other in ONE_CHUNK):
            same = best.setting.in_turns and not chunks_refused(other, best.chunks, best.mesh.pp)
            pins = replace(kept, schedule=other, chunks=best.chunks if same else None)
            yield _Change(f"schedule {other}", pins)
    for chunks in (best.chunks - 1, best.chunks + 1):
        legal = not chunks_refused(best.schedule, chunks, best.mesh.pp)
        if best.setting.in_turns and 0 < chunks <= fit and legal:
            text = "one chunk" if chunks == 1 else f"{chunks} chunks"
            yield _Change(text, replace(kept, chunks=chunks))


def _runnable(change: _Change) -> _Change:
    """With whole backwards where the change rules out divided ones."""
    pins = change.pins
    full = pins.recompute == "full"
    if pins.schedule not in DIVIDED or not refused(
        zero=pins.zero or 0, ep=pins.ep or 1, recomputes=full
    ):
        return change
    chunks, pp = pins.chunks or 1, pins.pp or 1
    if chunks > 1 and not chunks_refused("interleaved", chunks, pp):
        return replace(change, pins=replace(pins, schedule="interleaved"))
    return replace(change, pins=replace(pins, schedule=None, chunks=None))


def _level(best: Choice, ranks: int) -> int | None:
    """The ZeRO level of the plan where data parallelism is left to carry it."""
    return best.zero if best.mesh.replicas > 1 and best.setting.cluster.size > ranks else None


def _beside(values: list[int], value: int) -> list[int]:
    """The next smaller and the next larger of `values`."""
    lower = [v for v in values if v < value]
    upper = [v for v in values if v > value]
    return [*lower[-1:], *upper[:1]]


def _given(pins: Pins) -> dict[str, Any]:
    return {f.name: v for f in fields(Pins) if (v := getattr(pins, f.name)) is not None}


def _open(pinned: Pins, change: Pins) -> bool:
    """Whether the change contradicts nothing that is pinned."""
    return all(getattr(pinned, name) in (None, v) for name, v in _given(change).items())
