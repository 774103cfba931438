"""The stated time model: from the prices of blocks to the seconds of one training step.

A step runs m micro-batches through pp stages. With T_i the seconds that stage i is busy for one
micro-batch, and E_i what it does once at the end,

    step = sum_i T_i + (m - 1) * max_i T_i + max_i E_i

for GPipe and 1F1B alike (they differ in memory, not in time). The sum fills and drains the
pipeline, the slowest stage sets its beat. `autopar.cost.pipeline` simulates the same schedule event
by event.

T_i adds up, over the blocks of the stage:

- forward and backward: compute, and tensor-parallel communication that is not hidden;
- the forward again (compute and communication) for every recomputed block;
- data-parallel communication of the micro-batch that stays exposed. It overlaps with the compute of
  a neighbouring block, taken to last as long as the block itself, and slows it down: of n seconds
  behind h seconds of compute

      exposed(n, h) = max(0, n - h) + overlap_slowdown * min(n, h)

  - ZeRO-3 gathers the block's parameters before its forward: exposed(gather, forward); and again
    before its backward, during which gradients are also reduce-scattered:
    exposed(gather + reduce_scatter, backward + forward if recomputed). The first block of a stage
    has no predecessor to hide behind: its forward gather is exposed whole;
  - ZeRO-2 reduce-scatters gradients in every backward: exposed(reduce_scatter, backward ...);
- its own sends: the output forward (not the last stage), the input's gradient backward (not the
  first stage), each the tensor that one rank holds, over the link that pipeline neighbours use;
- host work of the framework for every block, if it has any.

E_i adds up:

- gradient synchronisation in the last backward: ZeRO-0 all-reduces, ZeRO-1 reduce-scatters, one
  bucket per block: exposed(sync, backward); the last bucket, that of the stage's first block, has
  nothing left to hide behind. ZeRO-2 and 3 have done it already. Where backwards are divided (zero
  bubble) it hides behind the gradients of weights alone, exposed(sync, weights);
- hybrid sharding: gathers and reduce-scatters are those of a group of neighbours; in the last
  backward every block's shard is then all-reduced over the groups, behind what its backward has
  left: exposed(all_reduce, max(0, backward - sync)), or where the groups of shards and of copies
  use no link in common, so that one does not wait for the other, behind max(backward, sync). The
  stage's first block has nothing left to hide it behind;
- ZeRO-1 and 2 gather updated parameters once, in the next forward: exposed(gather, forward) per
  block, whole for the first block;
- the sum over tp of gradients of `R*` parameters; that over copies of experts, if there is room for
  some (`autopar.cost.expert_copies`); the sum over stages of tied parameters, where the
  stages that hold them differ;
- the optimizer: every byte it reads or writes, at memory bandwidth; on the host, at that of the
  host's memory, after the way there and back.

Frameworks that do not overlap (`Setting.practice`) have these exposed whole.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

from autopar.block_cost import BlockCost, PartialRecompute
from autopar.cluster import Device, Link
from autopar.cost.collective import collective_time, group_levels
from autopar.cost.expert_copies import COPIED_OVER, expert_copies_seconds
from autopar.cost.memory import optimizer_bytes, trainable_shard
from autopar.cost.setting import Setting
from autopar.mesh import EXPERT_REPLICA, REPLICA, REPLICATE, SHARD

DATA = Path(__file__).parent.parent / "data" / "step.toml"
# What the seconds of a micro-batch go to.
PURPOSES = ("compute", "recompute", "tp_comm", "cp_comm", "ep_comm", "dp_comm", "pp_comm")
BREAKDOWN = ("compute", "recompute", "tp_comm", "dp_comm", "pp_comm", "bubble", "optimizer")


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """Exposed seconds of one block. Per micro-batch, but `end_*`, which are per step.

    `dp_kept` / `dp_recomputed`: data-parallel communication without / with recomputation.
    `first_gather`, `end_first`: what is added when the block is the first of its stage.
    `send`: one transfer, one way, of the values that pass to the next block.
    """

    compute: float
    tp_comm: float
    recompute: float
    dp_kept: float
    dp_recomputed: float
    first_gather: float
    send: float
    end_dp: float
    end_first: float
    end_tp: float
    end_optimizer: float

    @property
    def kept(self) -> float:
        """Seconds of a micro-batch when the block keeps its activations."""
        return self.compute + self.tp_comm + self.dp_kept

    @property
    def extra(self) -> float:
        """Seconds that recomputing the block adds to a micro-batch."""
        return self.recompute + self.dp_recomputed - self.dp_kept


class DpTimes(NamedTuple):
    """What data parallelism adds to the times of a block: the fields of `BlockTimes` of these names
    (`end`: `end_dp`)."""

    dp_kept: float
    dp_recomputed: float
    first_gather: float
    end: float
    end_first: float


def block_times(block: BlockCost, setting: Setting, dp: DpTimes | None = None) -> BlockTimes:
    """Price one block under `setting`; stage membership is added by `first_*` and `send`. `dp`:
    other than `dp_times`."""
    kept, recomputed, first, end, end_first = dp or dp_times(block, setting)
    return BlockTimes(
        compute=block.forward_compute + block.backward_compute + setting.practice.block_seconds,
        tp_comm=block.forward_comm + block.backward_comm,
        recompute=block.forward,
        dp_kept=kept,
        dp_recomputed=recomputed,
        first_gather=first,
        send=send_seconds(block.boundary_bytes, setting),
        end_dp=end,
        end_first=end_first,
        end_tp=block.parameter_reduce_seconds
        + sum(expert_copies_seconds(block, setting, axis) for axis in COPIED_OVER),
        end_optimizer=optimizer_seconds(block, setting),
    )


def dp_times(block: BlockCost, setting: Setting) -> DpTimes:
    """Those of one block, see the module's text."""
    if setting.mesh.replicas == 1:
        return DpTimes(0.0, 0.0, 0.0, 0.0, 0.0)
    gather, reduce = dp_collectives(block, setting)
    kept = recomputed = first = end = end_first = 0.0
    forward, backward = block.forward, block.backward
    last = block.backward_weights if setting.divided else backward
    if setting.zero == 3:
        before = exposed_gather(gather, forward, setting)
        both = gather + reduce
        kept = before + exposed_gradients(both, backward, setting)
        recomputed = before + exposed_gradients(both, backward + forward, setting)
        first = gather - before
    elif setting.zero == 2:
        kept = exposed_gradients(reduce, backward, setting)
        recomputed = exposed_gradients(reduce, backward + forward, setting)
    else:
        end = exposed_gradients(reduce, last, setting)
        end_first = reduce - end
    if setting.zero in (1, 2):
        seen = exposed_gather(gather, forward, setting)
        end, end_first = end + seen, end_first + gather - seen
    if copies := copies_seconds(block, setting):
        seen = behind_others(copies, last, (gather, reduce), setting)
        end, end_first = end + seen, end_first + copies - seen
    return DpTimes(kept, recomputed, first, end, end_first)


def extra_seconds(block: BlockCost, again: PartialRecompute, setting: Setting) -> float:
    """Seconds that recomputing a block in a given way adds to a micro-batch: they also hide
    communication of its backward."""
    hidden = 0.0
    if setting.mesh.replicas > 1 and setting.zero >= 2:
        gather, reduce = dp_collectives(block, setting)
        needed = reduce + (gather if setting.zero == 3 else 0.0)
        hidden = exposed_gradients(needed, block.backward, setting) - exposed_gradients(
            needed, block.backward + again.seconds, setting
        )
    return again.seconds - hidden


@cache
def usual_slowdown() -> float:
    """`overlap_slowdown` of a device that does not state its own."""
    return float(tomllib.loads(DATA.read_text(encoding="utf-8"))["overlap_slowdown"])


def exposed(needed: float, hiding: float, setting: Setting) -> float:
    """Seconds that communication of `needed` seconds adds to `hiding` seconds of compute."""
    return exposed_on(needed, hiding, setting.cluster.device)


def exposed_on(needed: float, hiding: float, device: Device) -> float:
    """`exposed` on a device."""
    slowdown = device.overlap_slowdown or usual_slowdown()
    return max(0.0, needed - hiding) + slowdown * min(needed, hiding)


def exposed_gather(needed: float, hiding: float, setting: Setting) -> float:
    """`exposed` where the framework overlaps the gathering of parameters, else all of it."""
    return exposed(needed, hiding, setting) if setting.practice.overlap_gathers else needed


def exposed_gradients(needed: float, hiding: float, setting: Setting) -> float:
    """`exposed` where the framework overlaps the reduction of gradients, else all of it."""
    return exposed(needed, hiding, setting) if setting.practice.overlap_gradients else needed


def exposed_copies(block: BlockCost, setting: Setting, backward: float | None) -> float:
    """Seconds that the all-reduce over copies (`copies_seconds`) adds to a block's last `backward`;
    None: there is nothing left to hide it behind."""
    needed = copies_seconds(block, setting)
    if needed == 0.0 or backward is None:
        return needed
    return behind_others(needed, backward, dp_collectives(block, setting), setting)


def behind_others(
    needed: float, backward: float, collectives: tuple[float, float], setting: Setting
) -> float:
    """What stays exposed of `needed` seconds in the last `backward` of a block where `collectives`
    of it are overlapped too: its reduction, and with ZeRO-3 its gather."""
    gather, reduce = collectives
    before = reduce + (gather if setting.zero == 3 else 0.0)
    mesh = setting.mesh
    apart = _apart(setting.cluster.links, mesh.stride(SHARD), mesh.dp_shard, mesh.dp_replicate)
    free = max(backward, before) if apart else max(0.0, backward - before)
    return exposed_gradients(needed, free, setting)


@lru_cache(maxsize=4096)
def _apart(links: tuple[Link, ...], stride: int, shard: int, replicate: int) -> bool:
    """Whether shards are summed over the groups of hybrid sharding on links that collectives inside
    the groups leave alone. `stride`: between neighbours of a group."""
    inside = {level.link for level in group_levels(links, shard, stride)}
    across = {level.link for level in group_levels(links, replicate, stride * shard)}
    return inside.isdisjoint(across)


def copies_seconds(block: BlockCost, setting: Setting) -> float:
    """Seconds to all-reduce a block's shard of gradients over the groups of hybrid sharding; not of
    experts that ep splits, which are sharded over all ranks that hold them."""
    mesh = setting.mesh
    if mesh.dp_replicate == 1 or setting.zero == 0:
        return 0.0
    nbytes = setting.shard(block.trainable - block.experts.trainable) * setting.bytes.reduce
    ranks, stride = mesh.dp_replicate, mesh.stride(REPLICATE)
    return collective_time("all_reduce", nbytes, ranks, stride, setting.cluster)


def dp_collectives(block: BlockCost, setting: Setting) -> tuple[float, float]:
    """Seconds to gather a block's parameters, and to all-reduce (ZeRO-0) or scatter gradients, over
    the ranks that ZeRO shards over; those of experts that ep splits after the others, over the
    ranks that hold the same ones."""
    mesh, size, experts = setting.mesh, setting.bytes, block.experts
    whole = setting.zero == 0 or setting.practice.reduce_whole
    reduce = "all_reduce" if whole else "reduce_scatter"

    def seconds(kind: str, nbytes: int, axis: str) -> float:
        ranks = mesh.degree(axis)
        if nbytes == 0 or ranks == 1:
            return 0.0
        return collective_time(kind, nbytes, ranks, mesh.stride(axis), setting.cluster)

    def both(kind: str, elements: int, of_experts: int, each: int) -> float:
        over = REPLICA if setting.zero == 0 else SHARD
        rest = seconds(kind, (elements - of_experts) * each, over)
        return rest + seconds(kind, of_experts * each, EXPERT_REPLICA)

    return (
        both("all_gather", block.parameters, experts.parameters, size.compute),
        both(reduce, block.trainable, experts.trainable, size.reduce),
    )


def send_seconds(nbytes: int, setting: Setting) -> float:
    """Seconds to pass the `nbytes` that a rank holds to the next pipeline stage."""
    mesh, cluster = setting.mesh, setting.cluster
    if mesh.pp == 1 or nbytes == 0:
        return 0.0
    if setting.practice.split_sends:
        gather = collective_time("all_gather", nbytes, mesh.tp, mesh.stride("tp"), cluster)
        nbytes = -(-nbytes // mesh.tp)
    else:
        gather = 0.0
    return gather + collective_time("send", nbytes, mesh.pp, mesh.stride("pp"), cluster)


def optimizer_seconds(block: BlockCost, setting: Setting) -> float:
    """Read parameter, gradient and states, write parameter and states, once each; an update that
    needs sums over all of a parameter first reads it, and the gradient, again."""
    device, update = setting.cluster.device, setting.update
    bandwidth = device.memory_bytes_per_second * device.memory_efficiency
    once = trainable_shard(block, setting) * setting.bytes.storage
    moved = update.passes * once
    if update.on_host:
        on_host = moved + 2 * update.host_copies * once
        return moved / device.host_bytes_per_second + on_host / device.host_memory_bytes_per_second
    return (moved + 2 * optimizer_bytes(block, setting)) / bandwidth


def tied_seconds(blocks: Sequence[BlockCost], group: str, setting: Setting) -> float:
    """Seconds to sum the gradient of a `group` of tied parameters over the stages that hold them.

    They are taken as one stage per block that holds some, spread evenly over the pipeline.
    """
    holders = [n for b in blocks if (n := b.tied_as(group).trainable)]
    if setting.mesh.pp == 1 or len(holders) < 2:
        return 0.0
    nbytes = setting.shard(max(holders)) * setting.bytes.reduce
    ranks = min(len(holders), setting.mesh.pp)
    stride = setting.mesh.stride("pp") * (setting.mesh.pp // ranks)
    return collective_time("all_reduce", nbytes, ranks, stride, setting.cluster)
