"""Over how many replicas ZeRO shards, in words."""

from __future__ import annotations

from autopar.mesh import Mesh
from autopar.plan_document import Plan
from autopar.report.format import percent_text
from autopar.units import format_bytes, format_seconds

BLOCKS_SHOWN = 6


def zero_text(plan: Plan) -> str:
    """`level 3`, and where it is so that there is one replica, or hybrid sharding over groups."""
    mesh = plan.mesh
    if mesh.replicas == 1:
        return f"level {plan.zero} (one replica)"
    return f"level {plan.zero}{groups_text(mesh)}{kept_text(plan)}"


def kept_text(plan: Plan) -> str:
    """` (9/34 blocks kept gathered)`; '' where none is."""
    return f" ({plan.keep_label} kept gathered)" if plan.keep_label else ""


def kept_sentence(plan: Plan) -> str:
    """One sentence on the blocks that are kept gathered; '' where none is."""
    if not plan.keep_label:
        return ""
    names = [name for stage in plan.stages for name in stage.keep_gathered]
    shown = ", ".join(names[:BLOCKS_SHOWN]) + (" …" if len(names) > BLOCKS_SHOWN else "")
    text = (
        f"The parameters of {plan.keep_label} are gathered once a step and kept "
        f"(reshard_after_forward=False): {shown}"
    )
    told = plan.predicted.get("kept_gathered") or {}
    if told.get("bytes") is None or told.get("seconds") is None:
        return f"{text}."
    share = told["seconds"] / plan.predicted.get("step_seconds", float("inf"))
    return (
        f"{text}; that takes {format_bytes(int(told['bytes']))} of a rank and saves "
        f"{format_seconds(told['seconds'])} of the step ({percent_text(share)})."
    )


def groups_text(mesh: Mesh) -> str:
    """` in 4 groups of 8 replicas`; '' without hybrid sharding."""
    if mesh.dp_replicate == 1:
        return ""
    return f" in {mesh.dp_replicate} groups of {mesh.dp_shard} replicas"


def shard_sentence(plan: Plan) -> str:
    """One sentence on hybrid sharding; '' without."""
    mesh = plan.mesh
    if mesh.dp_replicate == 1:
        return ""
    each = "for every micro-batch"
    gathered = each if plan.zero == 3 else "once a step"
    scattered = each if plan.zero > 1 else "once a step"
    return (
        f"Hybrid sharding: each of {mesh.dp_replicate} groups of {mesh.dp_shard} neighbours among "
        f"the {mesh.replicas} replicas holds all of what ZeRO-{plan.zero} shards; inside a group "
        f"parameters are gathered {gathered} and gradients scattered {scattered}, over the groups "
        "shards of gradients are summed in the last backward."
    )
