"""A second opinion on a plan: its time and memory, added up by another route than the search takes.

The search adds tables over intervals of blocks. Here every stage's schedule is walked action by
action: seconds are booked under what they are spent on, activations are counted while they live.
Only the prices of collectives and the memory of one block's states are shared. `assert_agrees` then
compares the two: a plan whose objective is not its cost must not leave the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Protocol

from autopar.block_cost import BlockCost, tie_groups
from autopar.cluster import Cluster
from autopar.cost.chunked_moment import ChunkPhase, chunked_memory
from autopar.cost.divided_moment import divided_memory
from autopar.cost.expert_copies import COPIED_OVER, expert_copies_seconds
from autopar.cost.fullest_moment import stage_memory
from autopar.cost.memory import StageMemory
from autopar.cost.pipeline import Event, actions, makespan, simulate, step_seconds
from autopar.cost.setting import Phase, Setting
from autopar.cost.stage_walk import Walk, part_seconds, walk
from autopar.cost.step import (
    dp_collectives,
    exposed_copies,
    exposed_gather,
    exposed_gradients,
    optimizer_seconds,
    tied_seconds,
)
from autopar.errors import PassError, PlanError
from autopar.interleaving import parts_of, waiting
from autopar.mesh import EP, Mesh
from autopar.plan_document import StagePlan

TOLERANCE = 1e-9


class Decisions(Protocol):
    """What is evaluated: a `Plan`, or the search's choice."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def microbatches(self) -> int: ...
    @property
    def schedule(self) -> str: ...
    @property
    def chunks(self) -> int: ...
    @property
    def zero(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def optimizer(self) -> str: ...
    @property
    def stages(self) -> tuple[StagePlan, ...]: ...


@dataclass(frozen=True)
class Evaluation:
    """Seconds of a step and bytes of every stage, as the stated model gives them.

    `part_forward` / `part_backward`: seconds that every part of the chain takes per micro-batch,
    its sends included; a stage is one part, or `chunks` of them; `part_weights`: what a divided
    backward does of it for the weights. `in_flight`: most parts of micro-batches that a stage
    holds. The closed form of `step_seconds` equals the simulated schedule when all stages are
    alike.
    """

    step_seconds: float
    time_breakdown: dict[str, float]
    memory_per_stage: tuple[StageMemory, ...]
    part_forward: tuple[float, ...]
    part_backward: tuple[float, ...]
    in_flight: tuple[int, ...]
    microbatches: int
    schedule: str
    chunks: int = 1
    part_weights: tuple[float, ...] = ()
    at_backward: tuple[tuple[ChunkPhase, ...], ...] = ()

    @property
    def stage_forward(self) -> tuple[float, ...]:
        """Seconds that a stage is busy with the forward of one micro-batch."""
        return self._per_stage(self.part_forward)

    @property
    def stage_backward(self) -> tuple[float, ...]:
        return self._per_stage(self.part_backward)

    def _per_stage(self, parts: Sequence[float]) -> tuple[float, ...]:
        stages = len(parts) // self.chunks
        held = (parts_of(self.schedule, i, stages, self.chunks) for i in range(stages))
        return tuple(sum(parts[part] for part in some) for some in held)

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        return tuple(f + b for f, b in zip(self.stage_forward, self.stage_backward, strict=True))

    @property
    def peak_bytes(self) -> int:
        return max(m.total for m in self.memory_per_stage)

    def events(self) -> list[Event]:
        """The schedule as it runs, for a timeline."""
        return simulate(
            self.part_forward,
            self.part_backward,
            self.microbatches,
            self.schedule,
            chunks=self.chunks,
            weights=self.part_weights,
        )

    @property
    def simulated_seconds(self) -> float:
        """All micro-batches, event by event, without the end of the step."""
        return makespan(self.events())


class _Agreeing(Protocol):
    @property
    def step_seconds(self) -> float: ...
    @property
    def peaks(self) -> tuple[int, ...]: ...


def assert_agrees(found: _Agreeing, seen: Evaluation, tolerance: float = TOLERANCE) -> None:
    """Raise `PassError` when the objective of a search is not the cost of its plan."""
    difference = abs(found.step_seconds - seen.step_seconds)
    peaks = tuple(m.total for m in seen.memory_per_stage)
    booked = sum(seen.time_breakdown.values())
    if difference > tolerance * seen.step_seconds or peaks != found.peaks:
        raise PassError(
            f"the search says {found.step_seconds!r} s and {found.peaks} bytes, the evaluation"
            f" {seen.step_seconds!r} s and {peaks} bytes",
            next_step="this is a fault of autopar: report the model, cluster and options",
        )
    if abs(booked - seen.step_seconds) > tolerance * seen.step_seconds:
        raise PassError(
            f"the time breakdown adds up to {booked!r} s of {seen.step_seconds!r} s",
            next_step="this is a fault of autopar: report the model, cluster and options",
        )


def evaluate(plan: Decisions, blocks: Sequence[BlockCost], cluster: Cluster) -> Evaluation:
    """Time and memory of `plan`; `blocks` are the prices of the whole chain, in order."""
    if [b.name for b in blocks] != [name for s in plan.stages for name in s.blocks]:
        raise PlanError(
            f"the stages hold {[s.blocks for s in plan.stages]}, the chain is"
            f" {[b.name for b in blocks]}",
            next_step="every block belongs to exactly one stage, in order",
        )
    setting = Setting(
        cluster,
        plan.mesh,
        plan.microbatch,
        plan.microbatches,
        plan.schedule,
        plan.zero,
        plan.precision,
        plan.optimizer,
        plan.chunks,
    )
    return evaluate_setting(setting, plan.stages, blocks)


def evaluate_setting(
    setting: Setting, parts: Sequence[StagePlan], blocks: Sequence[BlockCost]
) -> Evaluation:
    """Time and memory of `parts` of the chain, in order, under `setting`, which may be one that is
    never planned: practices of other frameworks. Interleaved schedules have `setting.chunks` times
    as many parts as stages; which ones a stage holds, `autopar.interleaving` says."""
    priced = {b.name: b for b in blocks}
    chain = [b.name for b in blocks]
    stages, chunks = setting.mesh.pp, setting.chunks
    if [name for p in parts for name in p.blocks] != chain or len(parts) != stages * chunks:
        raise PlanError(
            f"{len(parts)} parts hold {[p.blocks for p in parts]}, the chain is {chain}",
            next_step="every block belongs to exactly one part, in order, of pp x chunks parts",
        )
    orders = actions(setting.schedule, stages, setting.microbatches, chunks)
    costs = [part_seconds(i, parts, priced, setting) for i in range(len(parts))]
    held = [setting.parts_of(stage) for stage in range(stages)]
    walks = [walk(i, orders[i], [costs[part] for part in held[i]]) for i in range(stages)]
    memory = _memory(walks, parts, blocks, setting)
    whole = [_joined([parts[part] for part in some]) for some in held]
    ends = [_end(stage, whole, priced, setting) for stage in whole]
    return _whole(walks, ends, memory, setting)


def _memory(
    walks: Sequence[Walk],
    parts: Sequence[StagePlan],
    blocks: Sequence[BlockCost],
    setting: Setting,
) -> tuple[StageMemory, ...]:
    """Of every stage, at the fullest of the moments that its walk has met."""
    return tuple(
        rank_memory(i, walk.at_backward, parts, blocks, setting) for i, walk in enumerate(walks)
    )


def rank_memory(
    rank: int,
    at_backward: Sequence[ChunkPhase],
    parts: Sequence[StagePlan],
    blocks: Sequence[BlockCost],
    setting: Setting,
) -> StageMemory:
    """Of one stage, at the fullest of these moments of a step, or at its end."""
    names = {n: label for p in parts for n, label in p.recomputed.items()}
    spans = list(pairwise([0, *accumulate(len(p.blocks) for p in parts)]))
    if not setting.in_turns:
        phases = Phase.fullest([phase.live[0] for phase in at_backward], setting)
        kept = parts[rank].keep_gathered
        return stage_memory(blocks, *spans[rank], names, rank, setting, phases, kept)
    of_rank = divided_memory if setting.divided else chunked_memory
    return of_rank(
        blocks,
        [spans[part] for part in setting.parts_of(rank)],
        names,
        dict.fromkeys(at_backward),
        waiting(setting.schedule, setting.mesh.pp, setting.microbatches),
        setting,
    )


def _joined(parts: Sequence[StagePlan]) -> StagePlan:
    """All chunks of a stage as one."""
    return StagePlan(
        tuple(n for p in parts for n in p.blocks),
        tuple(n for p in parts for n in p.recompute),
        {n: label for p in parts for n, label in p.selective.items()},
        tuple(n for p in parts for n in p.keep_gathered),
    )


def _end(
    stage: StagePlan,
    stages: Sequence[StagePlan],
    priced: Mapping[str, BlockCost],
    setting: Setting,
) -> dict[str, float]:
    """Seconds at the end of the step, by purpose."""
    spent = dict.fromkeys(("dp_comm", "tp_comm", "ep_comm", "pp_comm", "optimizer"), 0.0)
    spent["optimizer"] += setting.practice.step_seconds
    for position, name in enumerate(stage.blocks):
        block = priced[name]
        gather, reduce = dp_collectives(block, setting)
        last = block.backward_weights if setting.divided else block.backward
        if setting.zero <= 1:
            spent["dp_comm"] += exposed_gradients(reduce, last if position else 0.0, setting)
        kept = setting.keeping if name in stage.keep_gathered else setting
        spent["dp_comm"] += exposed_copies(block, kept, last if position else None)
        if kept.zero in (1, 2):
            hidden = block.forward if position else 0.0
            spent["dp_comm"] += exposed_gather(gather, hidden, setting)
        spent["tp_comm"] += block.parameter_reduce_seconds
        for axis in COPIED_OVER:
            spent[f"{axis}_comm"] += expert_copies_seconds(block, setting, axis)
        spent["optimizer"] += optimizer_seconds(block, setting)
    for group in tie_groups([priced[n] for n in stage.blocks]):
        holders = [n for s in stages for n in s.blocks if priced[n].tied_as(group).trainable]
        here = [n for n in stage.blocks if n in holders]
        if here and len(here) < len(holders):
            spent["pp_comm"] += tied_seconds([priced[n] for n in holders], group, setting)
    return spent


def _whole(
    walks: Sequence[Walk],
    ends: Sequence[dict[str, float]],
    memory: tuple[StageMemory, ...],
    setting: Setting,
) -> Evaluation:
    """Put the stages together: the slowest sets the beat, the others' turns are bubble.

    With chunks, or divided backwards, there is no closed form for uneven stages: the schedule is
    simulated.
    """
    m = setting.microbatches
    busy = [sum(w.spent.values()) for w in walks]
    slowest = max(range(len(walks)), key=lambda i: (busy[i], -i))
    longest = max(range(len(ends)), key=lambda i: (sum(ends[i].values()), -i))
    places = {part: (i, c) for i in range(len(walks)) for c, part in enumerate(setting.parts_of(i))}
    of_parts = [places[part] for part in range(len(places))]
    forward = tuple(walks[i].forward[c] for i, c in of_parts)
    backward = tuple(walks[i].backward[c] for i, c in of_parts)
    weights = tuple(walks[i].weights[c] for i, c in of_parts) if setting.divided else ()
    bubble = sum(b / m for i, b in enumerate(busy) if i != slowest)
    if setting.in_turns:
        schedule = setting.schedule, setting.chunks
        bubble = step_seconds(forward, backward, m, *schedule, weights) - busy[slowest]
    breakdown = {**walks[slowest].spent, "bubble": bubble, "optimizer": 0.0}
    for purpose, seconds in ends[longest].items():
        breakdown[purpose] += seconds
    for axis in ("cp", EP):
        if setting.mesh.degree(axis) == 1:
            breakdown.pop(f"{axis}_comm")
    return Evaluation(
        step_seconds=bubble + busy[slowest] + sum(ends[longest].values()),
        time_breakdown=breakdown,
        memory_per_stage=memory,
        part_forward=forward,
        part_backward=backward,
        in_flight=tuple(w.in_flight for w in walks),
        microbatches=m,
        schedule=setting.schedule,
        chunks=setting.chunks,
        part_weights=weights,
        at_backward=tuple(tuple(w.at_backward) for w in walks),
    )
