"""What every stage does when, within one step, and the window of it that a picture can show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autopar.cost.pipeline import simulate
from autopar.plan_document import Plan
from autopar.report.facts import Facts

_KINDS = {
    **{"F": "forward", "R": "recompute", "B": "backward"},
    **{"I": "input gradients", "W": "weight gradients"},
}
MOST_MICROBATCHES = 64
SHOWN = 24


class Event(Protocol):
    """Anything with these six, a simulator's own record too; seconds from the step's start."""

    @property
    def stage(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def microbatch(self) -> int: ...
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def chunk(self) -> int: ...


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """`kind` is forward, recompute, backward or what a half of one makes (or another word, drawn in
    grey). `stage`: the row,
    which is a rank where ranks hold several `chunk`s (counted from 0)."""

    stage: int
    kind: str
    microbatch: int
    start: float
    end: float
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Window:
    """The events to draw; `note` says what was left out (empty when nothing was)."""

    events: tuple[TimelineEvent, ...]
    note: str = ""


def simulated(plan: Plan) -> Sequence[Event]:
    """The plan's own schedule with its predicted stage times; empty when it has none."""
    stages = Facts.of(plan).stage_seconds
    if len(stages) != len(plan.stages) or not all(
        {"forward", "backward"} <= set(s) for s in stages
    ):
        return []
    forward, backward = ([float(s[k]) for s in stages] for k in ("forward", "backward"))
    weights = [float(s.get("weights", 0.0)) for s in stages]
    return simulate(
        forward, backward, plan.microbatches, plan.schedule, chunks=plan.chunks, weights=weights
    )


def split_recompute(
    events: Iterable[Event], recompute: list[float], rows: int | None = None
) -> list[TimelineEvent]:
    """Cut the recomputation off the front of each backward.

    `recompute[chunk * rows + stage]` is in seconds per micro-batch; `rows`: how many stages (or
    ranks, where they hold chunks) there are. Events that have their own recompute records
    keep them. The kinds `F`, `B`, `I` and `W` are spelled out.
    """
    own = [
        TimelineEvent(e.stage, _KINDS.get(e.kind, e.kind), e.microbatch, e.start, e.end, e.chunk)
        for e in events
    ]
    if any(e.kind == "recompute" for e in own):
        return own
    result = []
    for event in own:
        part = event.chunk * (rows or 0) + event.stage
        first = recompute[part] if part < len(recompute) else 0.0
        if event.kind == "backward" and 0 < first < event.end - event.start:
            middle = event.start + first
            result += [replace(event, kind="recompute", end=middle), replace(event, start=middle)]
        else:
            result.append(event)
    return result


def window(events: Iterable[TimelineEvent], microbatches: int) -> Window:
    """All events, or the ramp up and some steady micro-batches when there are too many to see."""
    everything = tuple(events)
    if microbatches <= MOST_MICROBATCHES or not everything:
        return Window(everything)
    stages = 1 + max(e.stage for e in everything)
    shown = max(SHOWN, 2 * stages)
    first = tuple(e for e in everything if e.microbatch < shown)
    # Cut where the next micro-batch would begin on stage 0, or holes would look like bubbles.
    later = [e.start for e in everything if e.microbatch >= shown]
    cut = min(later, default=max(e.end for e in first))
    inside = tuple(e for e in first if e.start < cut)
    seen = max(e.microbatch for e in inside)
    end = max(e.end for e in everything)
    return Window(
        inside,
        f"Only the first {cut / end:.0%} of the step: micro-batches 0 to {seen} of {microbatches}.",
    )
