"""How a plan splits the experts of every layer over replicas, in words."""

from __future__ import annotations

from autopar.plan_document import Plan
from autopar.report.facts import Facts
from autopar.report.format import plural
from autopar.units import format_seconds


def expert_part(plan: Plan) -> str:
    """What a rank of ep holds: `32 of 256 experts of a layer`."""
    count = Facts.of(plan).experts
    return f"{count // plan.mesh.ep} of {count} experts of a layer" if count else "a part of them"


def expert_sentence(plan: Plan) -> str:
    """One sentence; '' where ep is 1."""
    mesh = plan.mesh
    if mesh.ep == 1:
        return ""
    text = (
        f"Each of {mesh.ep} ep ranks, neighbours among the {mesh.replicas} replicas, holds "
        f"{expert_part(plan)}; rows travel to their experts and back (all-to-all)"
    )
    if hidden := Facts.of(plan).experts_hidden:
        text += f", {hidden:.0%} of that time behind shared experts"
    if mesh.expert_replicas == 1:
        return f"{text}. No other rank holds the same experts: their gradients need no sum."
    same = f"{mesh.expert_replicas} ranks hold the same experts and sum their gradients"
    return f"{text}; {same}."


def copies_sentence(plan: Plan) -> str:
    """What spare slots may cost in time; '' without any, or where nothing is known."""
    if not (seconds := Facts.of(plan).copies_seconds):
        return ""
    slots = plural(plan.spare_experts, "spare slot of a layer", "spare slots of a layer")
    return (
        f"Each rank has {slots}: were there a copy in each, summing the gradients of copies "
        f"would take {format_seconds(seconds)} at the end of a step, which is counted."
    )
