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
from autopar.cost.fullest_moment import stage_memory
from autopar.cost.memory import StageMemory
from autopar.cost.pipeline import Action, Event, actions, makespan, simulate, step_seconds
from autopar.cost.setting import Phase, Setting
from autopar.cost.step import (
    PURPOSES,
    dp_collectives,
    exposed_gather,
    exposed_gradients,
    optimizer_seconds,
    send_seconds,
    tied_seconds,
)
from autopar.errors import PassError, PlanError
from autopar.interleaving import waiting
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
    its sends included; a stage is one part, or `chunks` of them. `in_flight`: most parts of
    micro-batches that a stage holds. The closed form of `step_seconds` equals the simulated
    schedule when all stages are alike.
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

    @property
    def stage_forward(self) -> tuple[float, ...]:
        """Seconds that a stage is busy with the forward of one micro-batch."""
        return _per_stage(self.part_forward, self.chunks)

    @property
    def stage_backward(self) -> tuple[float, ...]:
        return _per_stage(self.part_backward, self.chunks)

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
        )

    @property
    def simulated_seconds(self) -> float:
        """All micro-batches, event by event, without the end of the step."""
        return makespan(self.events())


def _per_stage(parts: Sequence[float], chunks: int) -> tuple[float, ...]:
    stages = len(parts) // chunks
    return tuple(sum(parts[i::stages]) for i in range(stages))


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
    as many parts as stages; stage i holds parts i, i + pp, ..."""
    priced = {b.name: b for b in blocks}
    chain = [b.name for b in blocks]
    stages, chunks = setting.mesh.pp, setting.chunks
    if [name for p in parts for name in p.blocks] != chain or len(parts) != stages * chunks:
        raise PlanError(
            f"{len(parts)} parts hold {[p.blocks for p in parts]}, the chain is {chain}",
            next_step="every block belongs to exactly one part, in order, of pp x chunks parts",
        )
    orders = actions(setting.schedule, stages, setting.microbatches, chunks)
    costs = [_part(i, parts, priced, setting) for i in range(len(parts))]
    walks = [
        _walk(i, orders[i], [costs[i + c * stages] for c in range(chunks)]) for i in range(stages)
    ]
    memory = _memory(walks, parts, blocks, setting)
    whole = [_joined(parts[i::stages]) for i in range(stages)]
    ends = [_end(stage, whole, priced, setting) for stage in whole]
    return _whole(walks, ends, memory, setting)


def _memory(
    walks: Sequence[_Walk],
    parts: Sequence[StagePlan],
    blocks: Sequence[BlockCost],
    setting: Setting,
) -> tuple[StageMemory, ...]:
    """Of every stage, at the fullest of the moments that its walk has met."""
    names = {n: label for p in parts for n, label in p.recomputed.items()}
    edges = [0, *accumulate(len(p.blocks) for p in parts)]
    spans = list(pairwise(edges))
    if setting.chunks == 1:
        counts = [[phase.live[0] for phase in walk.at_backward] for walk in walks]
        return tuple(
            stage_memory(blocks, *spans[i], names, i, setting, Phase.fullest(counts[i]))
            for i in range(len(walks))
        )
    early = waiting(setting.mesh.pp, setting.microbatches)
    return tuple(
        chunked_memory(
            blocks, spans[i :: len(walks)], names, dict.fromkeys(walk.at_backward), early, setting
        )
        for i, walk in enumerate(walks)
    )


def _joined(parts: Sequence[StagePlan]) -> StagePlan:
    """All chunks of a stage as one."""
    return StagePlan(
        tuple(n for p in parts for n in p.blocks),
        tuple(n for p in parts for n in p.recompute),
        {n: label for p in parts for n, label in p.selective.items()},
    )


@dataclass
class _Part:
    """One micro-batch through one part: seconds by purpose."""

    forward: dict[str, float]
    backward: dict[str, float]


def _part(
    index: int, parts: Sequence[StagePlan], priced: Mapping[str, BlockCost], setting: Setting
) -> _Part:
    part = parts[index]
    output = priced[part.blocks[-1]].boundary_bytes if index + 1 < len(parts) else 0
    received = priced[parts[index - 1].blocks[-1]].boundary_bytes if index else 0
    forward = _forward(part, priced, setting)
    backward = _backward(part, priced, setting)
    forward["pp_comm"] += send_seconds(output, setting)
    backward["pp_comm"] += send_seconds(received, setting)
    return _Part(forward, backward)


@dataclass
class _Walk:
    """One stage's schedule, walked: seconds by purpose over all micro-batches.

    `forward`, `backward`: seconds of one micro-batch through each chunk. `in_flight`: the most that
    are alive, over all chunks; `at_backward`: what is alive when each backward starts.
    """

    spent: dict[str, float]
    forward: list[float]
    backward: list[float]
    in_flight: int
    at_backward: list[ChunkPhase]


def _walk(index: int, order: Sequence[Action], chunks: Sequence[_Part]) -> _Walk:
    """Book every action of the stage's schedule; keep count of what is alive."""
    spent = dict.fromkeys(chunks[0].forward, 0.0)
    live, before, busiest = [0] * len(chunks), [False] * len(chunks), 0
    at_backward = []
    for action in order:
        part = chunks[action.chunk]
        for purpose, seconds in (part.forward if action.kind == "F" else part.backward).items():
            spent[purpose] += seconds
        if action.kind == "F":
            live[action.chunk] += 1
            busiest = max(busiest, sum(live))
        else:
            at_backward.append(ChunkPhase(action.chunk, tuple(live), tuple(before)))
            live[action.chunk] -= 1
            before[action.chunk] = True
    if any(live):
        raise PassError(
            f"stage {index} ends its schedule with {sum(live)} micro-batches alive",
            next_step="every forward needs its backward",
        )
    forward = [sum(p.forward.values()) for p in chunks]
    backward = [sum(p.backward.values()) for p in chunks]
    return _Walk(spent, forward, backward, busiest, at_backward)


def _forward(
    stage: StagePlan, priced: Mapping[str, BlockCost], setting: Setting
) -> dict[str, float]:
    """Seconds of one forward, by purpose."""
    spent = dict.fromkeys(PURPOSES, 0.0)
    for position, name in enumerate(stage.blocks):
        block = priced[name]
        spent["compute"] += block.forward_compute + setting.practice.block_seconds
        spent["tp_comm"] += block.forward_comm - block.forward_cp - block.forward_ep
        spent["ep_comm"] += block.forward_ep
        spent["cp_comm"] += block.forward_cp
        if setting.zero == 3:
            gather, _ = dp_collectives(block, setting)
            hidden = block.forward if position else 0.0
            spent["dp_comm"] += exposed_gather(gather, hidden, setting)
    return spent


def _backward(
    stage: StagePlan, priced: Mapping[str, BlockCost], setting: Setting
) -> dict[str, float]:
    """Seconds of one backward, by purpose."""
    ways = stage.recomputed
    spent = dict.fromkeys(PURPOSES, 0.0)
    for name in reversed(stage.blocks):
        block = priced[name]
        available = block.backward
        if name in ways:
            again = block.option(ways[name])
            spent["recompute"] += again.seconds
            available += again.seconds
        spent["compute"] += block.backward_compute
        spent["tp_comm"] += block.backward_comm - block.backward_cp - block.backward_ep
        spent["ep_comm"] += block.backward_ep
        spent["cp_comm"] += block.backward_cp
        if setting.zero >= 2:
            gather, scatter = dp_collectives(block, setting)
            needed = scatter + (gather if setting.zero == 3 else 0.0)
            spent["dp_comm"] += exposed_gradients(needed, available, setting)
    return spent


def _end(
    stage: StagePlan,
    stages: Sequence[StagePlan],
    priced: Mapping[str, BlockCost],
    setting: Setting,
) -> dict[str, float]:
    """Seconds at the end of the step, by purpose."""
    spent = {"dp_comm": 0.0, "tp_comm": 0.0, "pp_comm": 0.0, "optimizer": 0.0}
    spent["optimizer"] += setting.practice.step_seconds
    for position, name in enumerate(stage.blocks):
        block = priced[name]
        gather, reduce = dp_collectives(block, setting)
        if setting.zero <= 1:
            hidden = block.backward if position else 0.0
            spent["dp_comm"] += exposed_gradients(reduce, hidden, setting)
        if setting.zero in (1, 2):
            hidden = block.forward if position else 0.0
            spent["dp_comm"] += exposed_gather(gather, hidden, setting)
        spent["tp_comm"] += block.parameter_reduce_seconds
        spent["optimizer"] += optimizer_seconds(block, setting)
    for group in tie_groups([priced[n] for n in stage.blocks]):
        holders = [n for s in stages for n in s.blocks if priced[n].tied_as(group).trainable]
        here = [n for n in stage.blocks if n in holders]
        if here and len(here) < len(holders):
            spent["pp_comm"] += tied_seconds([priced[n] for n in holders], group, setting)
    return spent


def _whole(
    walks: Sequence[_Walk],
    ends: Sequence[dict[str, float]],
    memory: tuple[StageMemory, ...],
    setting: Setting,
) -> Evaluation:
    """Put the stages together: the slowest sets the beat, the others' turns are bubble.

    With chunks there is no closed form for uneven stages: the schedule is simulated.
    """
    m = setting.microbatches
    busy = [sum(w.spent.values()) for w in walks]
    slowest = max(range(len(walks)), key=lambda i: (busy[i], -i))
    longest = max(range(len(ends)), key=lambda i: (sum(ends[i].values()), -i))
    parts = range(setting.chunks)
    forward = tuple(w.forward[c] for c in parts for w in walks)
    backward = tuple(w.backward[c] for c in parts for w in walks)
    bubble = sum(b / m for i, b in enumerate(busy) if i != slowest)
    if setting.chunks > 1:
        bubble = (
            step_seconds(forward, backward, m, setting.schedule, setting.chunks) - busy[slowest]
        )
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
    )
