"""A row of a table of configurations, with the column names of published measurements, as a model
and a `Configuration`.

Columns: layers, hidden, heads, kv_heads, ffn, vocab, seq; gpu, gpu_mem_gb, n_gpus, n_nodes,
interconnect; tp, sp, pp, vp, cp, ep, etp, dp, shard, zero, mbs, gbs; precision, recompute,
attention, optimizer, schedule, dp_mode, compile; n_experts, topk, with `ffn` the width of one
expert. An empty cell means not stated. `shard` is the number of ranks that ZeRO shards over where
that is not dp x cp; a `dp_mode` may tell it too: `FSDP=128 x DP=8`, `HSDP (shard within node)`.
Over one rank it shards nothing: `FSDP=1 x DP=64` is data parallelism with ZeRO-0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.cost.setting import EVALUATED_PRECISION, Practice
from autopar.mesh import Mesh
from autopar.workflow.configuration import Configuration
from autopar.workflow.reported_practice import (
    InexpressibleError,
    Row,
    number,
    practice_facts,
    reported_cluster,
    whole_number,
)
from autopar.workflow.row_model import head_size, zoo_model
from autopar.workflow.row_schedule import row_schedule
from autopar.workflow.stand_in import Architecture

# Where cells are kept that a row has beyond its columns.
BEYOND = ""
# A parameter count that is further off than this says nothing about the form of the MLP.
CLOSE = 0.06
UNGATED = ("gpt", "mpt", "nemotron", "megatron", "bloom", "mt-nlg", "opt")
GATED = ("llama", "mistral", "qwen")
# What most models have; used where a row has no number of heads.
HEAD_SIZE = 128


@dataclass(frozen=True)
class RowConfiguration:
    """`assumed`: decisions that the row does not state. The model is `architecture`, or the model
    of the zoo that the row names."""

    architecture: Architecture | None
    layers: int
    configuration: Configuration
    assumed: tuple[str, ...] = ()
    zoo: str = ""

    @property
    def model(self) -> Architecture | str:
        """What `row_model.build` makes the model of."""
        found = self.zoo or self.architecture
        assert found, "a row without an architecture names a model of the zoo"
        return found


def read_row(row: Row) -> RowConfiguration:
    """Raises `InexpressibleError` with the reason, in few words."""
    if row.get(BEYOND):
        raise InexpressibleError(f"more cells than columns: {row[BEYOND]!r}")
    facts = practice_facts(row)
    _refuse(row)
    mesh = _mesh(row)
    cluster = reported_cluster(row, facts)
    if mesh.size != cluster.size:
        raise InexpressibleError("tp x cp x pp x dp is not the number of GPUs")
    mesh = _sharded(row, mesh, cluster.ranks_per_node)
    microbatch = whole_number(row, "mbs")
    per_rank, rest = divmod(whole_number(row, "gbs"), mesh.dp)
    if rest or per_rank % microbatch:
        raise InexpressibleError("global batch does not divide into micro-batches")
    count = per_rank // microbatch
    recompute = facts.get("recompute")
    if recompute is None:
        raise InexpressibleError(f"recomputation {(row.get('recompute') or '')[:40]!r}")
    schedule, chunks = row_schedule(row, mesh, count, recompute)
    precision = facts["precision"]
    assert precision in EVALUATED_PRECISION
    configuration = Configuration(
        cluster=cluster,
        mesh=mesh,
        sequence=whole_number(row, "seq"),
        microbatch=microbatch,
        microbatches=count,
        schedule=schedule,
        chunks=chunks,
        zero=_zero(row, mesh.pp),
        precision=precision,
        recompute=recompute,
        sequence_parallel={"0": False, "1": True}.get(row.get("sp") or ""),
        practice=Practice(
            facts["overlap_gradients"],
            facts["overlap_gathers"],
            bucket_bytes=facts.get("bucket_bytes", 0),
            gradient_buffer=facts["gradient_buffer"],
            gradient_buckets=facts.get("gradient_buckets", False),
            reduce_whole=facts.get("reduce_whole", False),
            split_sends=facts.get("split_sends", False),
            block_seconds=facts.get("block_seconds", 0.0),
            step_seconds=facts.get("step_seconds", 0.0),
        ),
        regathers=facts["regathers"],
        exchanges_parts=facts.get("exchanges_parts", False),
        by_parameters=facts.get("by_parameters", False),
        host_layer_seconds=facts["host_layer_seconds"],
    )
    assumed = [facts["assumed"]] if "assumed" in facts else []
    if not row.get("heads"):
        assumed.append("heads")
    zoo = zoo_model(row)
    architecture = None if zoo else _architecture(row, facts, mesh.tp)
    return RowConfiguration(
        architecture, whole_number(row, "layers"), configuration, tuple(assumed), zoo
    )


def _mesh(row: Row) -> Mesh:
    axes = ("pp", "dp", "tp", "cp", "ep")
    degrees: dict[str, Any] = {a: max(1, whole_number(row, a, 1)) for a in axes}
    mesh = Mesh(**degrees)
    # Not stated: Megatron's experts are split over tp as all else is.
    if _experts(row) and whole_number(row, "etp", mesh.tp) != mesh.tp:
        raise InexpressibleError("experts over ep and tp ranks together (etp is not tp)")
    if mesh.replicas % mesh.ep:
        raise InexpressibleError("ep does not divide dp x cp")
    return mesh


def _sharded(row: Row, mesh: Mesh, per_node: int) -> Mesh:
    """The mesh with the groups over which the row shards; `per_node`: ranks."""
    shard, told = whole_number(row, "shard", 0), _told_shard(row, mesh, per_node)
    if shard and told and shard != told:
        raise InexpressibleError(f"shard is {shard}, dp_mode {row['dp_mode']!r} says {told}")
    shard = shard or told
    if not shard or mesh.replicas == shard == 1:
        return mesh
    over = f"over {shard} of {mesh.replicas} data-parallel ranks"
    if mesh.replicas % shard:
        raise InexpressibleError(f"sharding {over}")
    zero = _zero(row, mesh.pp)
    if (zero > 0) != (shard > 1):
        raise InexpressibleError(f"ZeRO-{zero} with sharding {over}")
    if shard in (1, mesh.replicas):
        return mesh
    if mesh.ep > 1:
        raise InexpressibleError("hybrid sharding with ep")
    return replace(mesh, dp_replicate=mesh.replicas // shard)


def _told_shard(row: Row, mesh: Mesh, per_node: int) -> int:
    """Ranks that the row shards over by its `dp_mode`; 0: it does not say."""
    mode = (row.get("dp_mode") or "").lower()
    if fsdp := re.search(r"fsdp *= *([^\s,;x×*)]+)", mode):
        ranks = int(fsdp[1]) if fsdp[1].isdecimal() else 0
        copies = re.search(r"(?<![a-wyz])dp *= *([^\s,;x×*)]+)", mode)
        if copies is None:
            # Alone, 0 and 1 may be a switch, as false and true are.
            return ranks if ranks > 1 else 0
        if not copies[1].isdecimal() or ranks * int(copies[1]) != mesh.replicas:
            raise InexpressibleError(
                f"FSDP={fsdp[1]} x DP={copies[1]} of {mesh.replicas} data-parallel ranks"
            )
        return ranks
    if "hsdp" not in mode:
        return 0
    if re.search(r"shard\w* (within|in)( the| a)? node", mode):
        return max(1, per_node // mesh.tp)
    if not whole_number(row, "shard", 0):
        raise InexpressibleError("number of ranks that HSDP shards over not stated")
    return 0


def _experts(row: Row) -> int:
    """Experts of a layer; 0 for a single MLP."""
    count = whole_number(row, "n_experts", 0)
    return count if count > 1 else 0


def _refuse(row: Row) -> None:
    """What no configuration of this package can be."""
    if not _experts(row) and whole_number(row, "ep", 1) > 1:
        raise InexpressibleError("ep without experts")
    if _experts(row) and not row.get("topk"):
        raise InexpressibleError("topk not stated")
    for column in ("layers", "hidden", "ffn", "vocab", "seq", "n_gpus", "mbs", "gbs"):
        if not whole_number(row, column):
            raise InexpressibleError(f"{column} is {row[column]!r}")


def _zero(row: Row, pp: int) -> int:
    """As printed. Under a pipeline no framework scatters gradients after every micro-batch:
    ZeRO-2 there sums whole gradients and scatters once, which is ZeRO-1."""
    zero = whole_number(row, "zero", 0)
    if zero > 3:
        raise InexpressibleError(f"zero is {row['zero']!r}")
    return 1 if zero == 2 and pp > 1 else zero


def _heads(row: Row, hidden: int, tp: int) -> int:
    """As printed; else the number that divides among tp ranks and makes heads of about 128."""
    if row.get("heads"):
        return whole_number(row, "heads")
    fitting = [n for n in range(tp, hidden // 2 + 1, tp) if hidden % (2 * n) == 0]
    return min(fitting, key=lambda n: (abs(hidden / n - HEAD_SIZE), n), default=0)


def _architecture(row: Row, facts: Mapping[str, Any], tp: int) -> Architecture:
    """Gated or not and tied or not: by the printed parameter count, else by the model's family."""
    ffn, hidden = whole_number(row, "ffn"), whole_number(row, "hidden")
    heads = _heads(row, hidden, tp)
    size = head_size(row)
    if not heads or (not size and (hidden % heads or hidden // heads % 2)):
        raise InexpressibleError("hidden size does not divide into heads")
    kv_heads = whole_number(row, "kv_heads", heads)
    if not kv_heads or heads % kv_heads:
        raise InexpressibleError(f"{heads} heads do not divide among {kv_heads} kv_heads")

    def shape(gated: bool, tied: bool) -> Architecture:
        vocab = whole_number(row, "vocab")
        kernels = facts["fused_attention"], facts["wide_loss"]
        inner = _experts(row), whole_number(row, "topk", 0), size
        return Architecture(hidden, heads, kv_heads, ffn, vocab, gated, tied, *kernels, *inner)

    name = (row.get("model") or "").lower()
    gated = any(word in name for word in GATED)
    plain = any(word in name for word in UNGATED) or (ffn == 4 * hidden and not gated)
    likely = [shape(not plain, plain), shape(not plain, not plain)]
    count = number(row, "params_b", 0.0) * 1e9
    if not count:
        return likely[0]
    every = [*likely, shape(plain, plain), shape(plain, not plain)]
    layers = whole_number(row, "layers")
    closest = min(every, key=lambda s: abs(s.parameters(layers) - count))
    if abs(closest.parameters(layers) - count) > CLOSE * count:
        return likely[0]
    return closest
