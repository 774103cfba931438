"""The memory terms of the fullest rank as formulas beside their numbers, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autopar.plan_document import Plan
from autopar.report.facts import MEMORY_TERMS, Facts
from autopar.units import format_bytes


def memory_title(plan: Plan) -> str:
    """Which rank, and when; empty without formulas."""
    told = Facts.of(plan).memory_formulas
    if not told:
        return ""
    live = [int(n) for n in told.get("live") or ()]
    if not live:
        when = "at the end of the step"
    elif len(live) == 1:
        when = f"in a backward with {live[0]} of {plan.microbatches} micro-batches alive"
    else:
        each = ", ".join(map(str, live))
        when = f"in a backward with {each} micro-batches alive in its {len(live)} chunks"
    return f"Memory of pp rank {told.get('rank', 0)} at its fullest moment, {when}, in bytes:"


def memory_lines(plan: Plan) -> list[str]:
    """`optimizer: 2·4·n/d = 1.8 GiB.` for each term, and what the letters stand for."""
    told = Facts.of(plan).memory_formulas
    lines = []
    for term in MEMORY_TERMS:
        parts = (told.get("terms") or {}).get(term) or ()
        if parts:
            lines.append(f"{term}: {_sum(parts)}.")
    values = told.get("values") or {}
    if values:
        letters = (f"{k} = {v:,} ({_LETTERS.get(k, k)})" for k, v in values.items())
        lines.append(f"with {', '.join(letters)}.")
    return lines


_LETTERS = {
    "n": "parameters on the rank",
    "t": "trainable ones",
    "e": "those of experts",
    "d": "ranks that share them",
    "f": "ranks that share experts",
}


def _sum(parts: Sequence[Mapping[str, Any]]) -> str:
    amounts = [float(part.get("bytes") or 0) for part in parts]
    total = format_bytes(sum(amounts))
    if len(parts) == 1:
        return f"{parts[0].get('text', '?')} = {total}"
    text = ""
    for part, amount in zip(parts, amounts, strict=True):
        sign = " - " if amount < 0 else " + " if text else ""
        text += f"{sign}{part.get('text', '?')} [{format_bytes(abs(amount))}]"
    return f"{text} = {total}"
