"""Loss curves in a grid of characters, for a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def chart(one: Sequence[float], many: Sequence[Sequence[float]], height: int = 12) -> str:
    """`o` one device, `x` a run that lies elsewhere, `●` where all runs coincide."""
    everything = [value for curve in (one, *many) for value in curve]
    low, high = min(everything), max(everything)
    rows = [
        [round((high - value) / (high - low or 1) * (height - 1)) for value in curve]
        for curve in (one, *many)
    ]

    def cell(level: int, step: int) -> str:
        here = [row[step] == level for row in rows]
        return "●" if all(here) else "o" if here[0] else "x" if any(here) else " "

    lines = [
        f"{high - (high - low) * level / (height - 1):7.3f} ┤ "
        + " ".join(cell(level, step) for step in range(len(one)))
        for level in range(height)
    ]
    axis = f"{'':8}└{'─' * (2 * len(one))} step {len(one)}"
    return "\n".join([*lines, axis, f"{'':10}o one device   x ranks   ● all coincide"])
