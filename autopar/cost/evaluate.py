"""A second opinion on a plan: its time and memory, added up by another route than the search takes.

The search adds tables over intervals of blocks. Here every stage's schedule is walked action by
action: seconds are booked under what they are spent on, activations are counted while they live.
Only the prices of collectives and the memory of one block's states are shared. `assert_agrees` then
compares the two: a plan whose objective is not its cost must not leave the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from autopar.block_cost import BlockCost
from autopar.cluster import Cluster
from autopar.cost import memory
from autopar.cost.memory import StageMemory
from autopar.cost.pipeline import Event, actions, makespan, simulate
from autopar.cost.setting import Setting
from autopar.cost.step import dp_collectives, optimizer_seconds, send_seconds, tied_seconds
from autopar.errors import PassError, PlanError
from autopar.mesh import Mesh
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

    `stage_forward` / `stage_backward`: seconds that a stage is busy per micro-batch, its sends
    included. The closed form of `step_seconds` equals the simulated schedule when all stages are
    alike.
    """

    step_seconds: float
    time_breakdown: dict[str, float]
    memory_per_stage: tuple[StageMemory, ...]
    stage_forward: tuple[float, ...]
    stage_backward: tuple[float, ...]
    in_flight: tuple[int, ...]
    microbatches: int
    schedule: str

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        return tuple(f + b for f, b in zip(self.stage_forward, self.stage_backward, strict=True))

    @property
    def peak_bytes(self) -> int:
        return max(m.total for m in self.memory_per_stage)

    def events(self) -> list[Event]:
        """The schedule as it runs, for a timeline."""
        return simulate(self.stage_forward, self.stage_backward, self.microbatches, self.schedule)

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
    setting = Setting(
        cluster,
        plan.mesh,
        plan.microbatch,
        plan.microbatches,
        plan.schedule,
        plan.zero,
        plan.precision,
        plan.optimizer,
    )
    priced = {b.name: b for b in blocks}
    if [b.name for b in blocks] != [name for s in plan.stages for name in s.blocks]:
        raise PlanError(
            f"the stages hold {[s.blocks for s in plan.stages]}, the chain is {list(priced)}",
            next_step="every block belongs to exactly one stage, in order",
        )
    walks = [_walk(i, stage, plan.stages, priced, setting) for i, stage in enumerate(plan.stages)]
    ends = [_end(stage, plan.stages, priced, setting) for stage in plan.stages]
    return _whole(walks, ends, setting)


@dataclass
class _Walk:
    """One stage's schedule, walked: seconds by purpose over all micro-batches, and memory."""

    spent: dict[str, float]
    forward: float
    backward: float
    in_flight: int
    memory: StageMemory


def _walk(
    index: int,
    stage: StagePlan,
    stages: Sequence[StagePlan],
    priced: Mapping[str, BlockCost],
    setting: Setting,
) -> _Walk:
    """Book every action of the stage's schedule; keep count of what is alive."""
    output = priced[stage.blocks[-1]].boundary_bytes if index + 1 < len(stages) else 0
    received = priced[stages[index - 1].blocks[-1]].boundary_bytes if index else 0
    forward = _forward(stage, priced, setting)
    backward = _backward(stage, priced, setting)
    forward["pp_comm"] += send_seconds(output, setting)
    backward["pp_comm"] += send_seconds(received, setting)
    kept = received + output
    for name in stage.blocks:
        block = priced[name]
        kept += block.input_bytes if name in stage.recompute else block.saved_bytes
    spent = dict.fromkeys(forward, 0.0)
    live = most = count = busiest = 0
    for action in actions(setting.schedule, len(stages), setting.microbatches)[index]:
        for purpose, seconds in (forward if action.kind == "F" else backward).items():
            spent[purpose] += seconds
        if action.kind == "F":
            live, count = live + kept, count + 1
            most, busiest = max(most, live), max(busiest, count)
        else:
            live, count = live - kept, count - 1
    if live or count:
        raise PassError(
            f"stage {index} ends its schedule with {count} micro-batches alive",
            next_step="every forward needs its backward",
        )
    rebuilt = max((priced[name].saved_bytes for name in stage.recompute), default=0)
    found = _memory([priced[n] for n in stage.blocks], most + rebuilt, received + output, setting)
    return _Walk(spent, sum(forward.values()), sum(backward.values()), busiest, found)


def _forward(
    stage: StagePlan, priced: Mapping[str, BlockCost], setting: Setting
) -> dict[str, float]:
    """Seconds of one forward, by purpose."""
    spent = {"compute": 0.0, "recompute": 0.0, "tp_comm": 0.0, "dp_comm": 0.0, "pp_comm": 0.0}
    for position, name in enumerate(stage.blocks):
        block = priced[name]
        spent["compute"] += block.forward_compute
        spent["tp_comm"] += block.forward_comm
        if setting.zero == 3:
            gather, _ = dp_collectives(block, setting)
            hidden = block.forward if position else 0.0
            spent["dp_comm"] += max(0.0, gather - hidden)
    return spent


def _backward(
    stage: StagePlan, priced: Mapping[str, BlockCost], setting: Setting
) -> dict[str, float]:
    """Seconds of one backward, by purpose."""
    spent = {"compute": 0.0, "recompute": 0.0, "tp_comm": 0.0, "dp_comm": 0.0, "pp_comm": 0.0}
    for name in reversed(stage.blocks):
        block = priced[name]
        available = block.backward
        if name in stage.recompute:
            spent["recompute"] += block.forward
            available += block.forward
        spent["compute"] += block.backward_compute
        spent["tp_comm"] += block.backward_comm
        if setting.zero >= 2:
            gather, scatter = dp_collectives(block, setting)
            needed = scatter + (gather if setting.zero == 3 else 0.0)
            spent["dp_comm"] += max(0.0, needed - available)
    return spent


def _end(
    stage: StagePlan,
    stages: Sequence[StagePlan],
    priced: Mapping[str, BlockCost],
    setting: Setting,
) -> dict[str, float]:
    """Seconds at the end of the step, by purpose."""
    spent = {"dp_comm": 0.0, "tp_comm": 0.0, "pp_comm": 0.0, "optimizer": 0.0}
    for position, name in enumerate(stage.blocks):
        block = priced[name]
        gather, reduce = dp_collectives(block, setting)
        if setting.zero <= 1:
            spent["dp_comm"] += max(0.0, reduce - (block.backward if position else 0.0))
        if setting.zero in (1, 2):
            spent["dp_comm"] += max(0.0, gather - (block.forward if position else 0.0))
        spent["tp_comm"] += block.parameter_reduce_seconds
        spent["optimizer"] += optimizer_seconds(block.trainable, setting)
    holders = [n for s in stages for n in s.blocks if priced[n].tied_parameters]
    here = [n for n in stage.blocks if n in holders]
    if here and len(here) < len(holders):
        spent["pp_comm"] += tied_seconds([priced[n] for n in holders], setting)
    return spent


def _memory(
    blocks: Sequence[BlockCost], activations: int, passing: int, setting: Setting
) -> StageMemory:
    """The five terms; parameters that several blocks of the stage tie are held once."""
    seen_tied = False
    parameters = gradients = states = scratch = tied = 0
    for block in blocks:
        own = block.tied_parameters
        repeat = own if seen_tied else 0
        seen_tied = seen_tied or own > 0
        parameters += memory.parameter_bytes(block.parameters, setting)
        gradients += memory.gradient_bytes(block.trainable, setting)
        states += memory.optimizer_bytes(block.trainable, setting)
        scratch += memory.scratch_bytes(block.trainable, setting)
        if repeat:
            parameters -= memory.parameter_bytes(repeat, setting)
            gradients -= memory.gradient_bytes(repeat, setting)
            states -= memory.optimizer_bytes(repeat, setting)
            scratch -= memory.scratch_bytes(repeat, setting)
        tied = max(tied, own)
    first = second = 0
    for block in blocks:
        size = memory.gathered_bytes(block, setting)
        if size > first:
            first, second = size, first
        else:
            second = max(second, size)
    parameters += first + second + memory.tied_gathered_bytes(tied, setting)
    buffers = (
        max(b.transient_bytes for b in blocks)
        + max(memory.bucket_bytes(b, setting) for b in blocks)
        + passing
    )
    return StageMemory(
        parameters, gradients, states, activations, max(buffers, scratch - activations)
    )


def _whole(
    walks: Sequence[_Walk], ends: Sequence[dict[str, float]], setting: Setting
) -> Evaluation:
    """Put the stages together: the slowest sets the beat, the others' turns are bubble."""
    m = setting.microbatches
    busy = [sum(w.spent.values()) for w in walks]
    slowest = max(range(len(walks)), key=lambda i: (busy[i], -i))
    longest = max(range(len(ends)), key=lambda i: (sum(ends[i].values()), -i))
    breakdown = {**walks[slowest].spent}
    breakdown["bubble"] = sum(b / m for i, b in enumerate(busy) if i != slowest)
    breakdown["optimizer"] = 0.0
    for purpose, seconds in ends[longest].items():
        breakdown[purpose] += seconds
    step = sum(b / m for b in busy) + (m - 1) * busy[slowest] / m + sum(ends[longest].values())
    forward, backward = tuple(w.forward for w in walks), tuple(w.backward for w in walks)
    return Evaluation(
        step_seconds=step,
        time_breakdown=breakdown,
        memory_per_stage=tuple(w.memory for w in walks),
        stage_forward=forward,
        stage_backward=backward,
        in_flight=tuple(w.in_flight for w in walks),
        microbatches=m,
        schedule=setting.schedule,
    )
