"""Pipeline schedules as action lists, and what happens when they run: one event after another.

Interleaved 1F1B (Narayanan et al., SC21) gives every stage `chunks` parts of the model: chunk c of
stage i is part c * stages + i of the whole chain. Micro-batches pass through in groups of as many
as there are stages, one chunk after the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.errors import UsageError

SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a stage does: `F` or `B` of one micro-batch through one of its chunks (all counted
    from 0)."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, slots=True)
class Event:
    """An action as it ran, in seconds from the start of the step."""

    stage: int
    kind: str
    microbatch: int
    start: float
    end: float
    chunk: int = 0


def actions(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> list[list[Action]]:
    """What every stage does, in order.

    A single stage takes one micro-batch after the other. GPipe runs all forwards, then all
    backwards. 1F1B warms up with as many forwards as there are stages from this one on, then
    alternates a backward and a forward, then drains. `interleaved` does the same with chunks.
    Raises `UsageError` for an unknown schedule, or chunks where the schedule has none.
    """
    if schedule not in SCHEDULES:
        raise UsageError(
            f"unknown schedule {schedule!r}", next_step=f"choose one of {', '.join(SCHEDULES)}"
        )
    if schedule == "interleaved":
        return [_interleaved(i, stages, microbatches, chunks) for i in range(stages)]
    if chunks != 1:
        raise UsageError(
            f"{chunks} chunks per stage with {schedule}", next_step="use schedule=interleaved"
        )
    result = []
    for stage in range(stages):
        all_first = schedule == "gpipe" and stages > 1
        warmup = microbatches if all_first else min(microbatches, stages - stage)
        forwards = [Action("F", i) for i in range(microbatches)]
        backwards = [Action("B", i) for i in range(microbatches)]
        result.append(_alternate(forwards, backwards, warmup))
    return result


def _alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> list[Action]:
    """`warmup` forwards, then a backward and a forward in turn, then what is left."""
    order = list(forwards[:warmup])
    for i, backward in enumerate(backwards):
        order.append(backward)
        if warmup + i < len(forwards):
            order.append(forwards[warmup + i])
    return order


def _interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """Warms up until the first micro-batch comes back from the last chunk of the last stage."""
    if stages == 1 or chunks < 2:
        raise UsageError(
            f"interleaved with {chunks} chunks on {stages} stages",
            next_step="give at least 2 stages and 2 chunks, or use 1f1b",
        )
    units = list(_in_groups(stages, microbatches, chunks))
    forwards = [Action("F", i, c) for i, c in units]
    backwards = [Action("B", i, chunks - 1 - c) for i, c in units]
    ahead = 2 * (stages - stage - 1) + (chunks - 1) * stages + 1
    return _alternate(forwards, backwards, min(len(units), ahead))


def _in_groups(stages: int, microbatches: int, chunks: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, chunk) in the order of the forwards."""
    for start in range(0, microbatches, stages):
        for chunk in range(chunks):
            for microbatch in range(start, min(start + stages, microbatches)):
                yield microbatch, chunk


def in_flight(order: Sequence[Action]) -> int:
    """The most forwards (of chunks) whose backward has not ended yet."""
    live = most = 0
    for action in order:
        live += 1 if action.kind == "F" else 0
        most = max(most, live)
        live -= 1 if action.kind == "B" else 0
    return most


def simulate(
    forward: Sequence[float],
    backward: Sequence[float],
    microbatches: int,
    schedule: str,
    send: float | Sequence[float] = 0.0,
    chunks: int = 1,
) -> list[Event]:
    """Run the schedule: seconds of one micro-batch per part of the chain (a stage, or each of its
    `chunks`), `send` seconds across each boundary between parts.

    A forward waits for the part before it, a backward for the part after it, and both for the
    stage itself. Events come back in the order of their start.
    """
    parts = len(forward)
    stages = parts // chunks
    delay = [float(send)] * parts if isinstance(send, (int, float)) else [float(s) for s in send]
    orders = actions(schedule, stages, microbatches, chunks)
    done: dict[tuple[int, str, int], float] = {}
    clock, position = [0.0] * stages, [0] * stages
    events: list[Event] = []
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                action = orders[stage][position[stage]]
                part = action.chunk * stages + stage
                ready = _ready(part, action, parts, done, delay)
                if ready is None:
                    break
                seconds = forward[part] if action.kind == "F" else backward[part]
                start = max(clock[stage], ready)
                clock[stage] = start + seconds
                done[part, action.kind, action.microbatch] = clock[stage]
                events.append(
                    Event(stage, action.kind, action.microbatch, start, clock[stage], action.chunk)
                )
                position[stage] += 1
                moved = True
    return sorted(events, key=lambda e: (e.start, e.stage, e.end))


def _ready(
    part: int,
    action: Action,
    parts: int,
    done: dict[tuple[int, str, int], float],
    delay: Sequence[float],
) -> float | None:
    """When the input of an action has arrived; None while it has not been produced.

    `part`: which part of the chain the action runs.
    """
    if action.kind == "F":
        if part == 0:
            return 0.0
        sent = done.get((part - 1, "F", action.microbatch))
        return None if sent is None else sent + delay[part - 1]
    if part == parts - 1:
        return done.get((part, "F", action.microbatch))
    sent = done.get((part + 1, "B", action.microbatch))
    return None if sent is None else sent + delay[part]


def makespan(events: Sequence[Event]) -> float:
    """Seconds from the first start to the last end."""
    return max((e.end for e in events), default=0.0)
