"""`tp=8,pp=1,zero=3,microbatch=1,recompute=full,precision=bf16` as a `Configuration`.

Everything that decides time and memory must be given; what follows from the rest (dp from the
number of ranks, micro-batches from the global batch) may be left out.
"""

from __future__ import annotations

import difflib
from dataclasses import replace

from autopar import zero_bubble
from autopar.cluster import Cluster
from autopar.cost.optimizer import OPTIMIZERS, check_host
from autopar.cost.setting import EVALUATED_PRECISION
from autopar.errors import UsageError
from autopar.interleaving import (
    CHUNKED,
    DIVIDED,
    SCHEDULES,
    V_SHAPED,
    chunks_refused,
    refused,
)
from autopar.mesh import ORDERS, Mesh, order_refused
from autopar.search.options import is_number
from autopar.workflow.configuration import RECOMPUTE, Configuration

NUMBERS = ("tp", "pp", "dp", "cp", "ep", "shard", "vp", "microbatch", "microbatches")
WORDS = {
    "zero": ("0", "1", "2", "3"),
    "sp": ("0", "1"),
    "order": ORDERS,
    "schedule": SCHEDULES,
    "recompute": RECOMPUTE,
    "reshard": ("all", "none"),
    "precision": tuple(EVALUATED_PRECISION),
    "optimizer": tuple(OPTIMIZERS),
}
REQUIRED = ("tp", "pp", "zero", "microbatch", "recompute")


def configuration_from_pins(
    text: str, cluster: Cluster, *, sequence: int, global_batch: int, precision: str
) -> Configuration:
    """Raises `UsageError` naming the pin that is unknown, missing, or contradicts another.

    `precision` is that of a configuration that does not name one.
    """
    pins = _read(text)
    missing = [name for name in REQUIRED if name not in pins]
    if missing:
        raise UsageError(
            f"not pinned: {', '.join(missing)}",
            next_step=f"add --pin {','.join(f'{name}=...' for name in missing)}, or let "
            "`autopar plan` choose",
        )
    number = {name: int(pins[name]) for name in NUMBERS if name in pins}
    mesh = _ordered(_mesh(number, cluster), pins.get("order", ORDERS[0]))
    mesh = _sharded(mesh, number.get("shard"), int(pins["zero"]))
    microbatch = number["microbatch"]
    count, rest = divmod(global_batch, mesh.dp * microbatch)
    if rest or number.get("microbatches", count) != count or count < 1:
        raise UsageError(
            f"global batch {global_batch} is not dp {mesh.dp} x microbatch {microbatch} x "
            f"{number.get('microbatches', 'a whole number')}",
            next_step="change the global batch, dp or microbatch",
        )
    given = pins.get("schedule")
    chunks = number.get("vp", 2 if given in V_SHAPED else 1)
    schedule = given or ("interleaved" if chunks > 1 else "1f1b")
    if reason := chunks_refused(schedule, chunks, mesh.pp):
        raise UsageError(
            f"schedule={schedule} with vp={chunks} and pp={mesh.pp}: {reason}",
            next_step="change one of them",
        )
    if schedule in CHUNKED and (reason := refused(mesh.pp, count, schedule)):
        raise UsageError(
            f"schedule={schedule} with {count} micro-batches: {reason}",
            next_step="change the global batch, dp or microbatch",
        )
    if schedule in DIVIDED:
        _check_divided(schedule, int(pins["zero"]), mesh.ep, pins["recompute"])
    _check_reshard(pins, mesh, chunks)
    optimizer = pins.get("optimizer", "adamw")
    check_host(optimizer, cluster.device)
    return Configuration(
        cluster,
        mesh,
        sequence,
        microbatch,
        count,
        schedule,
        chunks,
        int(pins["zero"]),
        pins.get("precision", precision),
        optimizer,
        pins["recompute"],
        {"0": False, "1": True}.get(pins.get("sp", "")),
        reshards=pins.get("reshard") != "none",
    )


def _check_reshard(pins: dict[str, str], mesh: Mesh, chunks: int) -> None:
    """Parameters are gathered block by block, and not chunk by chunk where they shall be kept."""
    if "reshard" not in pins:
        return
    if int(pins["zero"]) != 3 or mesh.replicas == 1:
        raise UsageError(
            f"reshard={pins['reshard']} with zero={pins['zero']} on {mesh.replicas} replicas",
            next_step="only zero=3 over 2 or more reshards blocks after their forward",
        )
    if pins["reshard"] == "none" and chunks > 1:
        raise UsageError(
            f"reshard=none with {chunks} chunks, whose blocks are all resharded",
            next_step="use vp=1, or reshard=all",
        )


def _mesh(number: dict[str, int], cluster: Cluster) -> Mesh:
    tp, pp, cp = number["tp"], number["pp"], number.get("cp", 1)
    dp, ep = number.get("dp", max(1, cluster.size // (tp * pp * cp))), number.get("ep", 1)
    mesh = Mesh(pp, dp, tp, cp, ep)
    if mesh.size != cluster.size:
        on_cp = f" x cp {cp}" if cp > 1 else ""
        raise UsageError(
            f"pp {pp} x dp {mesh.dp}{on_cp} x tp {tp} is {mesh.size} ranks, the cluster has "
            f"{cluster.size}",
            next_step="all ranks are used: change one of the degrees",
        )
    if mesh.replicas % ep:
        raise UsageError(
            f"ep={ep} does not divide the {mesh.replicas} ranks of dp and cp",
            next_step="ep splits these into groups: choose one of their divisors",
        )
    return mesh


def _ordered(mesh: Mesh, order: str) -> Mesh:
    """The mesh with its axes in this order."""
    if reason := order_refused(order, mesh.cp):
        raise UsageError(
            f"order={order} with cp={mesh.cp}: {reason}",
            next_step=f"use order={ORDERS[0]}, or cp=1",
        )
    return replace(mesh, order=order)


def _check_divided(schedule: str, zero: int, ep: int, recompute: str) -> None:
    if reason := zero_bubble.refused(zero=zero, ep=ep, recomputes=recompute != "none"):
        raise UsageError(f"schedule={schedule}: {reason}", next_step="use schedule=interleaved")


def _sharded(mesh: Mesh, shard: int | None, zero: int) -> Mesh:
    """The mesh with groups of `shard` replicas that ZeRO shards over; None: all of them."""
    if shard is None or shard == mesh.replicas:
        return mesh
    if mesh.replicas % shard or shard == 1 or zero == 0:
        raise UsageError(
            f"shard={shard} with zero={zero} and {mesh.replicas} ranks of dp and cp",
            next_step="ZeRO of 1 to 3 shards over groups of 2 or more of these ranks, whose number "
            "shard divides",
        )
    return replace(mesh, dp_replicate=mesh.replicas // shard)


def _read(text: str) -> dict[str, str]:
    known = (*NUMBERS, *WORDS)
    pins: dict[str, str] = {}
    for part in (p.strip() for p in text.split(",")):
        if not part:
            continue
        name, _, value = (x.strip() for x in part.partition("="))
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"pins are {', '.join(known)}"
            raise UsageError(f"unknown pin {name!r}", next_step=hint)
        if name in NUMBERS and not (is_number(value) and int(value) > 0):
            raise UsageError(f"{name}={value[:20]}", next_step="give a whole number of at least 1")
        if name in WORDS and value not in WORDS[name]:
            raise UsageError(
                f"{name}={value} is not known", next_step=f"choose one of {', '.join(WORDS[name])}"
            )
        if pins.setdefault(name, value) != value:
            raise UsageError(
                f"{name} is pinned twice, to {pins[name]} and {value}",
                next_step="keep one of them",
            )
    return pins
