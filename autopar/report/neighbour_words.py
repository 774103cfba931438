"""What single changes of a plan would cost, in words, with what else changes along with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.plan_document import Plan
from autopar.report.facts import Facts
from autopar.report.limits import cost_text, sentence
from autopar.report.schedule_words import schedule_text


def neighbours_title(plan: Plan) -> str:
    """What is chosen anew beside the change."""
    pins = str(Facts.of(plan).search.get("pins") or "")
    words = [*([] if "cuts=" in pins else ["cuts"]), "placements"]
    words += [] if "recompute=" in pins else ["recomputation"]
    *before, last = words
    listed = f"{', '.join(before)} and {last}" if before else last
    return f"One decision changed; {listed} chosen anew:"


def neighbours(plan: Plan) -> list[str]:
    """What each single change of a decision would cost, the cheapest first."""
    facts = Facts.of(plan)
    never = float("inf")
    ranked = sorted(facts.neighbours, key=lambda n: n.get("step_seconds") or never)
    return [
        sentence(f"{n.get('change', '?')}{_along(plan, n)}: {cost_text(facts, n)}") for n in ranked
    ]


def _along(plan: Plan, other: Mapping[str, Any]) -> str:
    """`, with zbv and micro-batches of 4`: decisions that differ too, as the change asks for it."""
    change, mesh = str(other.get("change", "")), str(other.get("mesh", ""))
    found = []
    schedule = str(other.get("schedule", plan.schedule)), int(other.get("chunks") or plan.chunks)
    named = change.startswith("schedule") or change.endswith(("chunk", "chunks"))
    if schedule != (plan.schedule, plan.chunks) and not named and "pp1 " not in f"{mesh} ":
        found.append(schedule_text(*schedule))
    if other.get("zero", plan.zero) != plan.zero and not change.startswith("ZeRO"):
        found.append(f"ZeRO-{other['zero']}")
    size = (other.get("microbatch") or {}).get("size", plan.microbatch)
    if size != plan.microbatch and not change.startswith("micro-batch"):
        found.append(f"micro-batches of {size}")
    moved = mesh.startswith("dp") != plan.mesh.stages_inside
    if mesh and moved and not change.endswith("outermost"):
        found.append(f"{mesh[:2].upper()} outermost")
    return f", with {' and '.join(found)}" if found else ""
