"""Pipeline schedules as action lists, and what happens when they run: one event after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import UsageError


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a stage does: `F` or `B` of one micro-batch (both counted from 0)."""

    kind: str
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Event:
    """An action as it ran, in seconds from the start of the step."""

    stage: int
    kind: str
    microbatch: int
    start: float
    end: float


def actions(schedule: str, stages: int, microbatches: int) -> list[list[Action]]:
    """What every stage does, in order.

    A single stage takes one micro-batch after the other. GPipe runs all forwards, then all
    backwards. 1F1B warms up with as many forwards as there are stages from this one on, then
    alternates a backward and a forward, then drains.
    """
    if schedule not in ("gpipe", "1f1b"):
        raise UsageError(f"unknown schedule {schedule!r}", next_step="choose gpipe or 1f1b")
    result = []
    for stage in range(stages):
        all_first = schedule == "gpipe" and stages > 1
        warmup = microbatches if all_first else min(microbatches, stages - stage)
        order = [Action("F", i) for i in range(warmup)]
        for i in range(microbatches):
            order.append(Action("B", i))
            if warmup + i < microbatches:
                order.append(Action("F", warmup + i))
        result.append(order)
    return result


def in_flight(order: Sequence[Action]) -> int:
    """The most micro-batches between their forward and the end of their backward."""
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
) -> list[Event]:
    """Run the schedule: seconds of one micro-batch per stage, `send` seconds across each boundary.

    A forward waits for the stage before it, a backward for the stage after it, and both for the
    stage itself. Events come back in the order of their start.
    """
    stages = len(forward)
    delay = [float(send)] * stages if isinstance(send, (int, float)) else [float(s) for s in send]
    orders = actions(schedule, stages, microbatches)
    done: dict[tuple[int, str, int], float] = {}
    clock, position = [0.0] * stages, [0] * stages
    events: list[Event] = []
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while position[stage] < len(orders[stage]):
                action = orders[stage][position[stage]]
                ready = _ready(stage, action, stages, done, delay)
                if ready is None:
                    break
                seconds = forward[stage] if action.kind == "F" else backward[stage]
                start = max(clock[stage], ready)
                clock[stage] = start + seconds
                done[stage, action.kind, action.microbatch] = clock[stage]
                events.append(Event(stage, action.kind, action.microbatch, start, clock[stage]))
                position[stage] += 1
                moved = True
    return sorted(events, key=lambda e: (e.start, e.stage, e.end))


def _ready(
    stage: int,
    action: Action,
    stages: int,
    done: dict[tuple[int, str, int], float],
    delay: Sequence[float],
) -> float | None:
    """When the input of an action has arrived; None while it has not been produced."""
    if action.kind == "F":
        if stage == 0:
            return 0.0
        sent = done.get((stage - 1, "F", action.microbatch))
        return None if sent is None else sent + delay[stage - 1]
    if stage == stages - 1:
        return done.get((stage, "F", action.microbatch))
    sent = done.get((stage + 1, "B", action.microbatch))
    return None if sent is None else sent + delay[stage]


def makespan(events: Sequence[Event]) -> float:
    """Seconds from the first start to the last end."""
    return max((e.end for e in events), default=0.0)
