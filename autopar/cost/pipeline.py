"""Pipeline schedules as action lists, and what happens when they run: one event after another.

Interleaved 1F1B (Narayanan et al., SC21) gives every stage `chunks` parts of the model: chunk c of
stage i is part c * stages + i of the whole chain. Micro-batches pass through in rounds
(`autopar.interleaving`), one chunk after the other.

Zero-bubble (ZB1P of Qi et al., arXiv 2401.10241, on interleaved chunks) divides a backward: `I`
makes the gradients that the part before waits for, `W` those of the weights, and fills with it what
would be bubble. Its order is that of one chunk, too (ZB-H1). `zbv` is its V-shaped form
(`autopar.cost.v_shaped`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.cost.v_shaped import zbv_order
from autopar.errors import UsageError
from autopar.interleaving import DIVIDED, SCHEDULES, chunks_refused, parts_of, round_size

# The kinds of actions; the second one is a whole backward or its first half.
KINDS = ("F", "B", "W")
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a stage does: `F`, `B`, or the halves `I` and `W` of a backward, of one micro-batch
    through one of its chunks (all counted from 0)."""

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
    alternates a backward and a forward, then drains. `interleaved` does the same with chunks, and
    `zero-bubble` and `zbv` with divided backwards.
    Raises `UsageError` for an unknown schedule, or chunks that the schedule has not.
    """
    if schedule not in SCHEDULES:
        raise UsageError(
            f"unknown schedule {schedule!r}", next_step=f"choose one of {', '.join(SCHEDULES)}"
        )
    if reason := chunks_refused(schedule, chunks, stages):
        raise UsageError(
            f"{schedule} with {chunks} chunks on {stages} stages: {reason}",
            next_step="use other chunks, or 1f1b",
        )
    if schedule == "interleaved":
        return _interleaved(stages, microbatches, chunks)
    if schedule == "zero-bubble":
        return _zero_bubble(stages, microbatches, chunks)
    if schedule == "zbv":
        return [_named(*zbv_order(stage, stages, microbatches)) for stage in range(stages)]
    result = []
    forwards = [Action("F", i) for i in range(microbatches)]
    backwards = [Action("B", i) for i in range(microbatches)]
    for stage in range(stages):
        all_first = schedule == "gpipe" and stages > 1
        warmup = microbatches if all_first else min(microbatches, stages - stage)
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


def _interleaved(stages: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """Stages warm up until the first micro-batch comes back from the last chunk of the last one."""
    size = round_size(stages, microbatches)
    units = list(_in_rounds(size, microbatches, chunks))
    forwards = [Action("F", i, c) for i, c in units]
    backwards = [Action("B", i, chunks - 1 - c) for i, c in units]
    return [
        _alternate(forwards, backwards, min(len(units), _warmup(stage, stages, size, chunks)))
        for stage in range(stages)
    ]


def _named(chunk: Ints, microbatch: Ints, kind: Ints) -> list[Action]:
    """The actions of a divided schedule by their numbers."""
    numbers = zip(kind.tolist(), microbatch.tolist(), chunk.tolist(), strict=True)
    return [Action("FIW"[k], i, c) for k, i, c in numbers]


def divided_order(
    schedule: str, stage: int, stages: int, microbatches: int, chunks: int
) -> tuple[Ints, Ints, Ints]:
    """The order of a schedule that divides backwards, as `actions` has it: of each action its
    chunk, its micro-batch, and its kind, by its number (of `KINDS`)."""
    if schedule == "zbv":
        return zbv_order(stage, stages, microbatches)
    return zero_bubble_order(stage, stages, microbatches, chunks)


def _zero_bubble(stages: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """As `interleaved`, but a stage warms up with one forward only for each stage behind it, and
    stage r keeps back the second halves of r backwards, which it has left at the end."""
    size = round_size(stages, microbatches)
    units = list(_in_rounds(size, microbatches, chunks))
    forwards = [Action("F", i, c) for i, c in units]
    first = [Action("I", i, chunks - 1 - c) for i, c in units]
    second = [Action("W", i, chunks - 1 - c) for i, c in units]
    result = []
    for stage in range(stages):
        warmup = min(len(units), _divided_warmup(stage, stages, size, chunks))
        order, ready = [], iter(second)
        begun = 0
        for action in _alternate(forwards, first, warmup):
            order.append(action)
            begun += action.kind == "I"
            if action.kind == "I" and begun > stage:
                order.append(next(ready))
        result.append([*order, *ready])
    return result


def zero_bubble_order(
    stage: int, stages: int, microbatches: int, chunks: int
) -> tuple[Ints, Ints, Ints]:
    """The same order as `actions("zero-bubble", ...)[stage]`: of each action its chunk, its
    micro-batch, and its kind, by its number (of `KINDS`)."""
    size = round_size(stages, microbatches)
    chunk, microbatch = _units(size, microbatches, chunks)
    units, number = len(chunk), np.arange(len(chunk))
    ahead = min(units, _divided_warmup(stage, stages, size, chunks))
    # Turn n of the steady state: a first half, the second half of a turn before, and a forward.
    turn = np.concatenate([number - ahead, number, number + stage])
    kind = np.repeat(np.arange(3), units)
    within = np.array([2, 0, 1])[kind]
    order = np.lexsort((within, turn))
    taken = np.concatenate([chunk, chunks - 1 - chunk, chunks - 1 - chunk])
    return taken[order], np.tile(microbatch, 3)[order], kind[order]


def _units(size: int, microbatches: int, chunks: int) -> tuple[Ints, Ints]:
    """As `_in_rounds`: of each forward its chunk, and its micro-batch."""
    rounds = [np.arange(microbatches)[i : i + size] for i in range(0, microbatches, size)]
    chunk = np.concatenate([np.repeat(np.arange(chunks), len(some)) for some in rounds])
    return chunk, np.concatenate([np.tile(some, chunks) for some in rounds])


def _divided_warmup(stage: int, stages: int, size: int, chunks: int) -> int:
    """Forwards of a stage before its first `I`."""
    return (stages - stage - 1) + (chunks - 1) * size + 1


def interleaved_order(
    stage: int, stages: int, microbatches: int, chunks: int
) -> tuple[Ints, Ints, NDArray[np.bool_]]:
    """The same order as `actions("interleaved", ...)[stage]`: of each action its chunk and
    micro-batch, and whether it is a forward."""
    size = round_size(stages, microbatches)
    chunk, microbatch = _units(size, microbatches, chunks)
    units, number = len(chunk), np.arange(len(chunk))
    ahead = min(units, _warmup(stage, stages, size, chunks))
    first = np.where(number < ahead, number, 2 * number - ahead + 1)
    back = np.minimum(ahead + 2 * number, units + number)
    turns, forward = np.empty((2, 2 * units), np.int64), np.zeros(2 * units, bool)
    turns[:, first], turns[:, back] = (chunk, microbatch), (chunks - 1 - chunk, microbatch)
    forward[first] = True
    return turns[0], turns[1], forward


def _warmup(stage: int, stages: int, size: int, chunks: int) -> int:
    """Forwards of a stage before its first backward."""
    return 2 * (stages - stage - 1) + (chunks - 1) * size + 1


def _in_rounds(size: int, microbatches: int, chunks: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, chunk) in the order of the forwards."""
    for start in range(0, microbatches, size):
        for chunk in range(chunks):
            for microbatch in range(start, min(start + size, microbatches)):
                yield microbatch, chunk


def in_flight(order: Sequence[Action]) -> int:
    """The most forwards (of chunks) whose backward has not ended yet."""
    live = most = 0
    for action in order:
        live += 1 if action.kind == "F" else 0
        most = max(most, live)
        live -= 1 if action.kind in "BW" else 0
    return most


class _Step(NamedTuple):
    """An action with its place: what it waits for are the steps `after` (-1: nothing) and the one
    before it on the same stage; `kind`: its number (of `KINDS`); `boundary`: the border of parts
    that its input crosses, or -1."""

    stage: int
    part: int
    kind: int
    after: int
    boundary: int
    action: Action


@lru_cache(maxsize=16)
def _order(schedule: str, stages: int, microbatches: int, chunks: int) -> tuple[_Step, ...]:
    """The actions of all stages, each behind all that it waits for; no seconds are needed for it.

    Raises `UsageError` when some action waits for what never comes.
    """
    parts = stages * chunks
    orders = actions(schedule, stages, microbatches, chunks)
    held = [parts_of(schedule, stage, stages, chunks) for stage in range(stages)]
    number: dict[tuple[int, str, int], int] = {}
    position = [0] * stages
    steps: list[_Step] = []
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while position[stage] < len(order):
                action = order[position[stage]]
                part = held[stage][action.chunk]
                key, boundary = _input_of(part, action, parts)
                if key is not None and key not in number:
                    break
                after = -1 if key is None else number[key]
                number[part, action.kind, action.microbatch] = len(steps)
                kind = {"F": 0, "B": 1, "I": 1, "W": 2}[action.kind]
                steps.append(_Step(stage, part, kind, after, boundary, action))
                position[stage] += 1
                moved = True
    if len(steps) < sum(map(len, orders)):
        raise waits_for_itself(schedule, stages, microbatches, chunks)
    return tuple(steps)


def waits_for_itself(schedule: str, stages: int, microbatches: int, chunks: int) -> UsageError:
    """The error of a schedule in which some action waits for what never comes."""
    return UsageError(
        f"{schedule} with {stages} stages, {chunks} chunks and {microbatches} micro-batches "
        "waits for itself",
        next_step=f"use a multiple of {stages} micro-batches",
    )


def _input_of(part: int, action: Action, parts: int) -> tuple[tuple[int, str, int] | None, int]:
    """(part, kind, micro-batch) of the action that makes the input, and the border it crosses."""
    i = action.microbatch
    if action.kind == "F":
        return ((part - 1, "F", i), part - 1) if part else (None, -1)
    if action.kind == "W":
        return (part, "I", i), -1
    return ((part + 1, action.kind, i), part) if part < parts - 1 else ((part, "F", i), -1)


def finish_times(
    forward: Sequence[float],
    backward: Sequence[float],
    microbatches: int,
    schedule: str,
    send: float | Sequence[float] = 0.0,
    chunks: int = 1,
    weights: Sequence[float] = (),
) -> tuple[tuple[_Step, ...], list[float]]:
    """When each action ends, in seconds from the start of the step; see `simulate`."""
    parts = len(forward)
    delay = [float(send)] * parts if isinstance(send, (int, float)) else [float(s) for s in send]
    delay.append(0.0)  # at -1: no border is crossed
    stages = parts // chunks
    steps = _order(schedule, stages, microbatches, chunks)
    seconds = _seconds_of_kinds(forward, backward, schedule, weights)
    clock, ends = [0.0] * stages, [0.0] * len(steps)
    for number, (stage, part, kind, after, boundary, _) in enumerate(steps):
        start = clock[stage]
        if after >= 0:
            start = max(start, ends[after] + delay[boundary])
        ends[number] = clock[stage] = start + seconds[kind][part]
    return steps, ends


def _seconds_of_kinds(
    forward: Sequence[float], backward: Sequence[float], schedule: str, weights: Sequence[float]
) -> tuple[Sequence[float], ...]:
    """Seconds of every part, by the number of a kind."""
    if schedule not in DIVIDED:
        return forward, backward
    later = weights or [0.0] * len(backward)
    return forward, [b - w for b, w in zip(backward, later, strict=True)], later


def simulate(
    forward: Sequence[float],
    backward: Sequence[float],
    microbatches: int,
    schedule: str,
    send: float | Sequence[float] = 0.0,
    chunks: int = 1,
    weights: Sequence[float] = (),
) -> list[Event]:
    """Run the schedule: seconds of one micro-batch per part of the chain (a stage, or each of its
    `chunks`), `send` seconds across each boundary between parts. `weights`: of the `backward`, what
    a divided one does for the weights.

    A forward waits for the part before it, a backward for the part after it, and both for the
    stage itself. Events come back in the order of their start.
    """
    steps, ends = finish_times(forward, backward, microbatches, schedule, send, chunks, weights)
    by_kind = _seconds_of_kinds(forward, backward, schedule, weights)
    events = []
    for step, end in zip(steps, ends, strict=True):
        action = step.action
        seconds = by_kind[step.kind][step.part]
        events.append(
            Event(step.stage, action.kind, action.microbatch, end - seconds, end, action.chunk)
        )
    return sorted(events, key=lambda e: (e.start, e.stage, e.end))


def step_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    microbatches: int,
    schedule: str,
    chunks: int = 1,
    weights: Sequence[float] = (),
) -> float:
    """Seconds from the first start to the last end of `simulate`, without listing the events."""
    _, ends = finish_times(
        forward, backward, microbatches, schedule, chunks=chunks, weights=weights
    )
    return max(ends, default=0.0)


def makespan(events: Sequence[Event]) -> float:
    """Seconds from the first start to the last end."""
    return max((e.end for e in events), default=0.0)
