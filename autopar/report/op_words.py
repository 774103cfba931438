"""The heaviest ops of a plan, in words."""

from __future__ import annotations

from autopar.plan_document import Plan
from autopar.report.facts import Facts
from autopar.report.format import percent_text
from autopar.units import format_seconds

# What limits an op of each roofline class.
CLASSES = {
    "compute": "arithmetic",
    "memory": "HBM",
    "launch": "launching kernels",
    "communication": "collectives",
}


def class_sentence(plan: Plan) -> str:
    """What the ops of the busiest rank wait for, before anything overlaps; '' where it is not
    known."""
    facts = Facts.of(plan)
    seconds = facts.class_seconds
    total = sum(seconds.values())
    if not total:
        return ""
    told = [
        f"{CLASSES[name]} {format_seconds(seconds[name])} ({percent_text(seconds[name] / total)})"
        for name in sorted(CLASSES, key=lambda name: -seconds.get(name, 0.0))
        if seconds.get(name)
    ]
    return f"Its ops, without what runs again, are limited by {', '.join(told)}."


def heaviest(plan: Plan) -> list[str]:
    """A sentence for each: what it takes of a step on the rank that has the most of its blocks."""
    facts = Facts.of(plan)
    found = []
    for op in facts.heaviest_ops:
        seconds, count = float(op.get("seconds") or 0.0), int(op.get("count") or 1)
        share = seconds / facts.step_seconds if facts.step_seconds else 0.0
        block, module = str(op.get("block", "?")), str(op.get("module") or "")
        where = module.removeprefix(f"{block}.") if module not in ("", block) else ""
        found.append(
            f"{op.get('op', '?')}{f' of {where}' if where else ''} in {block}"
            f"{f' (×{count})' if count > 1 else ''}: {format_seconds(seconds)}, "
            f"{percent_text(share)} of the step, {op.get('bound', '?')}-bound."
        )
    return found
