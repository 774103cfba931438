"""Whether the fields of a plan, perhaps edited by hand, fit each other: no model is needed."""

from __future__ import annotations

import re
from collections import Counter

from autopar.errors import PlanError
from autopar.interleaving import CHUNKED, DIVIDED, chunks_refused, refused
from autopar.mesh import ORDERS, order_refused
from autopar.plan_document import OF_ELEMENTS, Plan
from autopar.zero_bubble import refused as not_divided

# The name of a cluster that says how many ranks it has: h100:2x8, cpu:4.
_RANKS = re.compile(r"^[\w-]+:(\d{1,9})(?:x(\d{1,9}))?$")


def check_consistent(plan: Plan) -> None:
    """Raises `PlanError` naming the fields that contradict each other, and what would fit."""
    check_batch(plan)
    check_order(plan)
    check_expert_groups(plan)
    check_shards(plan)
    _check_ranks(plan)
    check_schedule(plan)
    check_stages(plan)
    _check_kinds(plan)
    wanted = {
        "memory_per_stage": (plan.mesh.pp, "pp ranks" if plan.chunks > 1 else "stages"),
        "stage_seconds": (len(plan.stages), "stages"),
    }
    for field, (number, what) in wanted.items():
        told = plan.predicted.get(field) or ()
        if len(told) not in (0, number):
            raise PlanError(
                f"predicted.{field} has {len(told)} entries for {number} {what}",
                next_step="remove the predictions of an edited plan, or make it again",
            )


def check_batch(plan: Plan) -> None:
    """The micro-batches of all replicas are the global batch."""
    product = plan.mesh.dp * plan.microbatch * plan.microbatches
    if product != plan.global_batch:
        raise PlanError(
            f"dp {plan.mesh.dp} x microbatch {plan.microbatch} x microbatches "
            f"{plan.microbatches} = {product}, but the global batch is {plan.global_batch}",
            next_step="edit one of the four so that the product fits",
        )
    if plan.sizes.get("batch") != plan.microbatch:
        raise PlanError(
            f"sizes.batch is {plan.sizes.get('batch')}, the microbatch is {plan.microbatch}",
            next_step="set both to the same number",
        )


def check_expert_groups(plan: Plan) -> None:
    """Groups of ep are whole parts of the replicas, and experts may have spare slots."""
    mesh = plan.mesh
    if mesh.replicas % mesh.ep:
        raise PlanError(
            f"mesh.ep is {mesh.ep}, which does not divide the {mesh.replicas} replicas (dp "
            f"{mesh.dp} x cp {mesh.cp})",
            next_step="use an ep that divides dp x cp",
        )
    if plan.spare_experts and plan.optimizer not in OF_ELEMENTS:
        raise PlanError(
            f"spare_experts is {plan.spare_experts}, but the states of {plan.optimizer} are not of "
            "single elements, so they can't be moved or copied with an expert",
            next_step=f"set optimizer to one of {', '.join(OF_ELEMENTS)}, or spare_experts to 0",
        )


def check_order(plan: Plan) -> None:
    """Replicas lie at even distances, as the groups of collectives do."""
    mesh = plan.mesh
    if reason := order_refused(mesh.order, mesh.cp):
        raise PlanError(
            f"mesh.order is {mesh.order} and mesh.cp is {mesh.cp}: {reason}",
            next_step=f"use the order {ORDERS[0]}, or cp 1",
        )


def check_shards(plan: Plan) -> None:
    """Groups over which ZeRO shards are whole parts of the replicas, and there is a shard."""
    mesh, groups = plan.mesh, plan.mesh.dp_replicate
    if groups == 1:
        return
    told = f"mesh.dp_replicate is {groups}"
    if mesh.replicas % groups or mesh.dp_shard == 1:
        raise PlanError(
            f"{told}, which does not divide the {mesh.replicas} replicas (dp {mesh.dp} x cp "
            f"{mesh.cp}) into groups of 2 or more",
            next_step="use a divisor of dp x cp, and ZeRO level 0 where nothing is to be sharded",
        )
    if plan.zero == 0:
        raise PlanError(
            f"{told}, but zero is 0, which shards nothing",
            next_step="use zero 1, 2 or 3, or dp_replicate 1",
        )


def check_schedule(plan: Plan) -> None:
    """The schedule can have as many chunks for each pp rank, and as many micro-batches."""
    if plan.schedule in CHUNKED and plan.mesh.pp == 1:
        raise PlanError(
            f"schedule is {plan.schedule!r}, but mesh.pp is 1",
            next_step="use pp of at least 2, or schedule 1f1b with chunks 1",
        )
    if reason := chunks_refused(plan.schedule, plan.chunks, plan.mesh.pp):
        raise PlanError(
            f"schedule is {plan.schedule!r} with chunks {plan.chunks}: {reason}",
            next_step="change one of the two",
        )
    if plan.schedule not in CHUNKED:
        return
    if reason := refused(plan.mesh.pp, plan.microbatches, plan.schedule):
        raise PlanError(
            f"schedule is {plan.schedule!r}, but {reason}",
            next_step=f"use a multiple of {plan.mesh.pp} microbatches, or schedule 1f1b",
        )
    if plan.schedule in DIVIDED:
        recomputes = any(stage.recomputed for stage in plan.stages)
        if reason := not_divided(zero=plan.zero, ep=plan.mesh.ep, recomputes=recomputes):
            raise PlanError(
                f"schedule is {plan.schedule!r}, but {reason}",
                next_step="use schedule interleaved",
            )


def check_stages(plan: Plan) -> None:
    """As many stages as pp ranks have chunks, none empty; each block once; only own blocks
    recomputed."""
    number = plan.mesh.pp * plan.chunks
    if len(plan.stages) != number:
        product = f" x chunks {plan.chunks} = {number}" if plan.chunks > 1 else ""
        raise PlanError(
            f"mesh.pp is {plan.mesh.pp}{product}, but there are {len(plan.stages)} stages",
            next_step="give one entry of `stages` for each pipeline stage",
        )
    counts = Counter(b for s in plan.stages for b in s.blocks)
    if twice := [b for b, n in counts.items() if n > 1]:
        raise PlanError(
            f"stages: block {twice[0]!r} is in them {counts[twice[0]]} times",
            next_step="give every block to one stage",
        )
    for index, stage in enumerate(plan.stages):
        if not stage.blocks:
            raise PlanError(
                f"stages[{index}].blocks is empty", next_step="give every stage a block"
            )
        for field in ("recompute", "keep_gathered"):
            named = getattr(stage, field)
            strangers = [b for b in named if b not in stage.blocks]
            if strangers:
                raise PlanError(
                    f"stages[{index}].{field} names {strangers[0]!r}, which that stage does not "
                    "hold",
                    next_step=f"its blocks are {', '.join(stage.blocks[:4])} …",
                )
            if len(set(named)) < len(named):
                raise PlanError(
                    f"stages[{index}].{field} names a block twice", next_step="name it once"
                )
        if stage.keep_gathered:
            _check_gathered(plan, index)
        _check_selective(plan, index)


def _check_gathered(plan: Plan, index: int) -> None:
    """Parameters are gathered again for each block with ZeRO-3 alone, so only there can it be
    otherwise for some."""
    where = f"stages[{index}].keep_gathered names {plan.stages[index].keep_gathered[0]!r}"
    if plan.zero != 3 or plan.mesh.replicas == 1:
        raise PlanError(
            f"{where}, but zero is {plan.zero} and there are {plan.mesh.replicas} replicas",
            next_step="remove keep_gathered, or use zero 3 with dp x cp of 2 or more",
        )
    if plan.schedule in CHUNKED:
        raise PlanError(
            f"{where}, but schedule is {plan.schedule!r} with {plan.chunks} chunks",
            next_step="remove keep_gathered, or use schedule 1f1b or gpipe",
        )


def _check_selective(plan: Plan, index: int) -> None:
    """Blocks recomputed in part are the stage's, not recomputed whole, and their set is in
    `reruns`."""
    stage, where = plan.stages[index], f"stages[{index}].selective"
    kind_of = {block: kind for kind, blocks in plan.kinds.items() for block in blocks}
    if any("full" in sets for sets in plan.reruns.values()):
        raise PlanError(
            "reruns name a set 'full', which means whole blocks",
            next_step="give the set another name, or list the block in `recompute`",
        )
    for block, label in stage.selective.items():
        if block not in stage.blocks:
            raise PlanError(
                f"{where} names {block!r}, which that stage does not hold",
                next_step=f"its blocks are {', '.join(stage.blocks[:4])} …",
            )
        if block in stage.recompute:
            raise PlanError(
                f"{where} names {block!r}, which `recompute` names too",
                next_step="leave it in one of them",
            )
        kind = kind_of.get(block, block)
        sets = plan.reruns.get(kind, {})
        if label not in sets:
            raise PlanError(
                f"{where}.{block} is {label!r}, which is no set of reruns[{kind!r}]",
                next_step=f"its sets are {list(sets)}",
            )


def _check_ranks(plan: Plan) -> None:
    found = _RANKS.match(plan.cluster)
    if found is None:
        return
    ranks = int(found.group(1)) * int(found.group(2) or 1)
    if ranks != plan.mesh.size:
        raise PlanError(
            f"mesh is {plan.mesh}, which is {plan.mesh.size} ranks, but cluster {plan.cluster!r} "
            f"has {ranks}",
            next_step="edit one of them so that all ranks are used",
        )


def _check_kinds(plan: Plan) -> None:
    """Kinds are named by their first block, and hold the blocks of the stages in their order."""
    order = {b: i for i, b in enumerate(b for s in plan.stages for b in s.blocks)}
    held: Counter[str] = Counter()
    for kind, blocks in plan.kinds.items():
        held.update(blocks)
        if not blocks or blocks[0] != kind:
            first = repr(blocks[0]) if blocks else "nothing"
            raise PlanError(
                f"kinds[{kind!r}] starts with {first}", next_step="name a kind by its first block"
            )
        places = [order[b] for b in blocks if b in order]
        if places != sorted(places):
            raise PlanError(
                f"stages: blocks of the kind {kind!r} are out of order",
                next_step=f"their order is {', '.join(blocks[:4])} …",
            )
    if plan.kinds and dict(held) != dict.fromkeys(order, 1):
        odd = next(b for b in (*order, *held) if held[b] != 1 or b not in order)
        where = "no stage" if odd not in order else f"{held[odd]} of the kinds"
        raise PlanError(
            f"block {odd!r} is in {where}", next_step="give every block one stage and one kind"
        )
    for field in ("placements", "cp_placements", "reruns"):
        named = getattr(plan, field)
        strangers = sorted(set(named) - set(plan.kinds))
        if plan.kinds and strangers:
            raise PlanError(
                f"{field} name {strangers[0]!r}, which is no kind of block",
                next_step=f"the kinds are {', '.join(list(plan.kinds)[:4])} …",
            )
