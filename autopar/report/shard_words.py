"""Over how many replicas ZeRO shards, in words."""

from __future__ import annotations

from autopar.mesh import Mesh
from autopar.plan_document import Plan


def zero_text(plan: Plan) -> str:
    """`level 3`, and where it is so that there is one replica, or hybrid sharding over groups."""
    mesh = plan.mesh
    if mesh.replicas == 1:
        return f"level {plan.zero} (one replica)"
    return f"level {plan.zero}{groups_text(mesh)}"


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
