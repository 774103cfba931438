"""What the search is given: inputs, limits, and the decisions that the user pins."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

from autopar import zero_bubble
from autopar.cluster import Cluster
from autopar.cost.memory import DEFAULT_MARGIN, memory_limit
from autopar.cost.optimizer import OPTIMIZERS
from autopar.cost.setting import PRECISION
from autopar.errors import UsageError
from autopar.experts.spare_slots import check_spare
from autopar.interleaving import CHUNKED, DIVIDED, ONE_CHUNK, SCHEDULES, chunks_refused
from autopar.mesh import ORDERS, order_refused
from autopar.plan_document import BOUNDARY
from autopar.search.block_names import check_block_names, names_of
from autopar.search.recompute_pin import check_recompute, recompute_value, recomputes
from autopar.search.reshard_pin import check_reshard, reshard_value
from autopar.units import check_time_limit

_NUMBERS = ("tp", "pp", "dp", "cp", "ep", "shard", "microbatch", "microbatches", "chunks")
# Digits; no cluster has as many ranks.
LONGEST_NUMBER = 12
WEIGHTS = ("any", "split")


@dataclass(frozen=True)
class Pins:
    """Decisions that are not searched; None is free.

    `microbatch`: size on one data-parallel rank; `microbatches`: how many per step; `chunks`:
    stages of every pp rank (`autopar.interleaving`); `cuts`: the first block of every stage but the
    first (or of every stage). `weights`: `split` stores every weight matrix sliced over tp where a
    dim divides. `shard`: over how many replicas ZeRO shards;
    fewer than all of them is hybrid sharding. `recompute`: which blocks are recomputed
    (`search.recompute_pin`). `reshard`: of ZeRO-3's blocks those whose parameters
    are resharded after every forward (`search.reshard_pin`).
    `order`: which axes neighbour ranks, one of `autopar.mesh.ORDERS`.
    """

    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    zero: int | None = None
    microbatch: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    recompute: str | tuple[str, ...] | None = None
    boundary: str | None = None
    weights: str | None = None
    cuts: tuple[str, ...] | None = None
    cp: int | None = None
    ep: int | None = None
    shard: int | None = None
    reshard: str | tuple[str, ...] | None = None
    order: str | None = None

    def __str__(self) -> str:
        parts = []
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None:
                text = "+".join(value) if isinstance(value, tuple) else str(value)
                parts.append(f"{f.name}={text}")
        return ",".join(parts)

    def without(self, *names: str) -> Pins:
        """The same pins with `names` free."""
        return replace(self, **{name: None for name in names})


@dataclass(frozen=True)
class SearchOptions:
    """Inputs of a search.

    `memory_limit`: bytes that the five memory terms of a rank may take in all;
    None takes the device's memory less its context and a fragmentation `margin`.
    `time_limit`: seconds after which the best plan so far is returned with its gap.
    `alternatives`: how many other mesh shapes to report. `forced`: those of `pins` that the program
    leaves no choice about; they are never relaxed. `spare_experts`: slots of every rank beyond its
    part of a layer's experts.
    """

    global_batch: int
    precision: str = "bf16-mixed"
    optimizer: str = "adamw"
    memory_limit: int | None = None
    margin: float = DEFAULT_MARGIN
    pins: Pins = field(default_factory=Pins)
    time_limit: float | None = None
    alternatives: int = 3
    forced: Pins = field(default_factory=Pins)
    spare_experts: int = 0

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise UsageError(
                f"global batch {self.global_batch}", next_step="give at least one sample per step"
            )
        if self.time_limit is not None:
            check_time_limit(self.time_limit)
        _known("precision", self.precision, tuple(PRECISION))
        _known("optimizer", self.optimizer, tuple(OPTIMIZERS))
        check_spare(self.spare_experts, self.optimizer)
        if self.memory_limit is not None and self.memory_limit < 1:
            raise UsageError(
                f"memory limit of {self.memory_limit} bytes",
                next_step="give a positive size, for example 70GiB",
            )

    def limit(self, cluster: Cluster) -> int:
        """Bytes that the five memory terms may take on each rank of `cluster`."""
        if self.memory_limit is not None:
            return self.memory_limit
        return memory_limit(cluster.device, self.margin)


def parse_pins(text: str) -> Pins:
    """Read `tp=8,pp=4,zero=1,microbatch=1,recompute=full,cuts=model.layers.4+model.layers.8`.

    Raises `UsageError` on an unknown name (with the closest known one), a repeated name, or a value
    that the decision can't take.
    """
    values: dict[str, object] = {}
    known = [f.name for f in fields(Pins)]
    for part in (p.strip() for p in text.split(",")):
        if not part:
            continue
        name, equals, value = (x.strip() for x in part.partition("="))
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"pins are {', '.join(known)}"
            raise UsageError(f"unknown pin {name!r}", next_step=hint)
        if not equals or not value:
            raise UsageError(f"pin {part!r} has no value", next_step=f"write {name}=VALUE")
        if name in values:
            raise UsageError(
                f"{name} is pinned twice, to {values[name]} and {value}",
                next_step="keep one of them",
            )
        values[name] = _value(name, value)
    return Pins(**values)  # type: ignore[arg-type]


def is_number(text: str) -> bool:
    """Whether `int` reads it as a whole number that could be one of ranks."""
    return text.isascii() and text.isdecimal() and len(text) <= LONGEST_NUMBER


def _value(name: str, text: str) -> object:
    if name == "cuts":
        return names_of(name, text)
    if name == "reshard":
        return reshard_value(text)
    if name == "recompute":
        return recompute_value(text)
    if name == "zero":
        _known("zero", text, ("0", "1", "2", "3"))
        return int(text)
    if name in _NUMBERS:
        if not is_number(text) or int(text) < 1:
            raise UsageError(
                f"{name}={text[:LONGEST_NUMBER]} is not a degree",
                next_step="give a whole number of at least 1",
            )
        return int(text)
    if name == "schedule":
        _known("schedule", text, SCHEDULES)
    if name == "boundary" and not BOUNDARY.match(text):
        raise UsageError(f"boundary={text} is not known", next_step="give R, or S(dim), as S(1)")
    if name == "order":
        _known("order", text, ORDERS)
    if name == "weights":
        _known("weights", text, WEIGHTS)
    return text


def _known(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        close = difflib.get_close_matches(value, allowed, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(
            f"{name}={value} is not known", next_step=f"{hint}choose one of {', '.join(allowed)}"
        )


def stage_starts(pins: Pins, names: Sequence[str]) -> tuple[int, ...] | None:
    """The first block of every stage as indexes into the chain `names`, from `pins.cuts`."""
    if pins.cuts is None:
        return None
    check_block_names(pins.cuts, names, "cut before")
    starts = [names.index(name) for name in pins.cuts]
    if starts != sorted(set(starts)):
        raise UsageError(
            f"cuts {'+'.join(pins.cuts)} are not in the order of the blocks",
            next_step="name every stage's first block once, from front to back",
        )
    return tuple(starts) if starts and starts[0] == 0 else (0, *starts)


def check_pins(
    pins: Pins,
    cluster: Cluster,
    global_batch: int,
    names: Sequence[str],
    tp_degrees: Sequence[int],
    cp_degrees: Sequence[int] = (1,),
    no_sequence: str = "",
    experts: tuple[int, str] = (1, "the model has no experts"),
) -> None:
    """Raise `UsageError` for pins that contradict each other, the cluster, model or batch.

    `experts`: the number that ep has to divide, and why there are none.
    """
    count, no_experts = experts
    if pins.ep is not None and count % pins.ep:
        legal = [d for d in range(1, count + 1) if count % d == 0]
        raise UsageError(
            f"ep={pins.ep} is not legal: {no_experts or f'it must divide the {count} experts'}",
            next_step=f"choose one of ep={', '.join(map(str, legal))}",
        )
    if pins.ep is not None and pins.dp is not None and pins.dp * (pins.cp or 1) % pins.ep:
        raise UsageError(
            f"ep={pins.ep} does not divide dp x cp = {pins.dp} x {pins.cp or 1}",
            next_step="replicas split experts: pin a dp that ep divides, or free one of the two",
        )
    if pins.cp is not None and pins.cp not in cp_degrees:
        why = no_sequence or "it must divide the number of ranks and the sequence"
        raise UsageError(
            f"cp={pins.cp} is not legal for this model on {cluster.size} ranks: {why}",
            next_step=f"choose one of cp={', '.join(map(str, cp_degrees))}",
        )
    if pins.tp is not None and pins.tp not in tp_degrees:
        raise UsageError(
            f"tp={pins.tp} is not legal for this model on {cluster.size} ranks: it must divide the"
            " number of ranks and the sizes of at least one sharded dim",
            next_step=f"choose one of tp={', '.join(map(str, tp_degrees))}",
        )
    if pins.pp is not None and pins.pp > len(names):
        raise UsageError(
            f"pp={pins.pp}, but the model has {len(names)} blocks",
            next_step=f"choose pp of at most {len(names)}",
        )
    starts = stage_starts(pins, names)
    _check_chunks(pins, len(names))
    pp = cut_ranks(pins, starts)
    if starts is not None and (pp == 0 or pins.pp not in (None, pp)):
        each = f" of {pins.chunks} for each pp rank" if pins.chunks else ""
        raise UsageError(
            f"pp={pins.pp}, but the cuts make {len(starts)} stages{each}"
            if pins.pp
            else f"the cuts make {len(starts)} stages, not a multiple of chunks={pins.chunks}",
            next_step="pin one of the two",
        )
    _check_world(pins, cluster.size, pp)
    _check_order(pins)
    _check_shard(pins, cluster.size)
    check_reshard(pins, names)
    check_recompute(pins, names)
    _check_batch(pins, global_batch)


def _check_order(pins: Pins) -> None:
    """Replicas are at even distances, as the groups of collectives are."""
    if reason := order_refused(pins.order, pins.cp or 1):
        raise UsageError(
            f"order={pins.order} with cp={pins.cp}: {reason}",
            next_step=f"pin order={ORDERS[0]}, or cp=1",
        )


def _check_shard(pins: Pins, ranks: int) -> None:
    """There is something to shard, and the groups are whole parts of the replicas."""
    shard, replicas = pins.shard, (pins.dp or 0) * (pins.cp or 1)
    if shard is None:
        return
    if shard == 1 or pins.zero == 0:
        raise UsageError(
            f"shard={shard} with zero={pins.zero}" if pins.zero is not None else f"shard={shard}",
            next_step="zero=0 shards nothing; pin zero of 1 to 3 with a shard of 2 or more",
        )
    if replicas % shard:
        raise UsageError(
            f"shard={shard} does not divide dp x cp = {pins.dp} x {pins.cp or 1}",
            next_step="ZeRO shards over groups of replicas: choose one of their divisors",
        )
    if ranks % shard:
        legal = [d for d in range(2, ranks + 1) if ranks % d == 0]
        raise UsageError(
            f"shard={shard} does not divide the {ranks} ranks, of which replicas are a part",
            next_step=f"choose one of shard={', '.join(map(str, legal)) or 'none'}",
        )


def cut_ranks(pins: Pins, starts: Sequence[int] | None) -> int | None:
    """The pp that pinned cuts make (0: they are no multiple of the chunks), else the pinned pp."""
    if starts is None:
        return pins.pp
    ranks, rest = divmod(len(starts), pins.chunks or 1)
    return 0 if rest else ranks


def _check_chunks(pins: Pins, blocks: int) -> None:
    """Chunks and schedule fit each other and the chain."""
    chunks, schedule = pins.chunks, pins.schedule
    reason = chunks_refused(schedule, chunks, pins.pp or 2) if schedule and chunks else ""
    if reason:
        raise UsageError(
            f"schedule={schedule} with chunks={chunks}: {reason}",
            next_step="change one of the two, or free it",
        )
    interleaved = schedule in CHUNKED or (chunks or 1) > 1
    if interleaved and pins.pp == 1:
        raise UsageError(
            f"schedule={schedule or 'interleaved'} with pp=1",
            next_step="pin pp of at least 2, or free it",
        )
    if schedule in DIVIDED:
        _check_divided(pins)
    several = schedule in CHUNKED and schedule not in ONE_CHUNK
    if several and pins.cuts is not None and chunks is None:
        raise UsageError(
            f"schedule={schedule} with cuts, but without chunks",
            next_step="pin chunks too: the cuts make pp x chunks stages",
        )
    chunks = chunks or (2 if several else 1)
    parts = (pins.pp or 2) * chunks
    if interleaved and parts > blocks:
        raise UsageError(
            f"pp={pins.pp or 2} x chunks={chunks} is {parts} stages, but the model has"
            f" {blocks} blocks",
            next_step="choose fewer stages or chunks",
        )


def _check_divided(pins: Pins) -> None:
    again = recomputes(pins)
    if reason := zero_bubble.refused(zero=pins.zero or 0, ep=pins.ep or 1, recomputes=again):
        raise UsageError(
            f"schedule={pins.schedule} can't be pinned with that: {reason}",
            next_step="pin schedule=interleaved, or free the other",
        )


def _check_world(pins: Pins, world: int, pp: int | None) -> None:
    given = {"pp": pp, "dp": pins.dp, "cp": pins.cp, "tp": pins.tp}
    # Of the axes cp alone is 1 unless it has a reason to be more.
    complete = None not in (pp, pins.dp, pins.tp)
    pinned = {name: degree for name, degree in given.items() if degree is not None}
    product = 1
    for degree in pinned.values():
        product *= degree
    text = " x ".join(f"{name} {degree}" for name, degree in pinned.items())
    total = f" = {product}" if len(pinned) > 1 else ""
    if complete and product != world:
        raise UsageError(
            f"{text} is {product} ranks, the cluster has {world}",
            next_step="all ranks are used: free one of the degrees or change it",
        )
    if world % product:
        raise UsageError(
            f"{text}{total} does not divide the {world} ranks of the cluster",
            next_step="all ranks are used: choose degrees whose product divides them",
        )


def _check_batch(pins: Pins, global_batch: int) -> None:
    given = {"dp": pins.dp, "microbatch": pins.microbatch, "microbatches": pins.microbatches}
    pinned = {name: value for name, value in given.items() if value is not None}
    product = 1
    for value in pinned.values():
        product *= value
    text = " x ".join(f"{name} {value}" for name, value in pinned.items())
    total = f" = {product}" if len(pinned) > 1 else ""
    if global_batch % product or (len(pinned) == 3 and product != global_batch):
        raise UsageError(
            f"global batch {global_batch} is not a multiple of {text}{total}"
            if global_batch % product
            else f"global batch {global_batch} is not {text}{total}",
            next_step="global batch = dp x microbatch x microbatches: free or change one of them",
        )
