"""What a search tells while it runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """Where the search stands; handed to the `progress` callback now and then: configurations that
    were looked at, left out by a bound, and not looked at yet. `interrupted`: it ends with the best
    plan so far."""

    explored: int
    waiting: int
    best_seconds: float | None
    bound_seconds: float
    pruned: int = 0
    interrupted: bool = False
