"""Schedules, in words."""

from __future__ import annotations

from autopar.report.format import plural


def schedule_text(schedule: str, chunks: int) -> str:
    if schedule == "interleaved":
        return f"interleaved 1F1B with {chunks} chunks"
    if schedule == "zero-bubble":
        return f"zero-bubble with {plural(chunks, 'chunk')}"
    if schedule == "zbv":
        return "V-shaped zero-bubble"
    return {"gpipe": "GPipe", "1f1b": "1F1B"}.get(schedule, schedule)
