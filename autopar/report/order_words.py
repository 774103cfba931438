"""Which axes neighbour ranks, in words."""

from __future__ import annotations

from autopar.plan_document import Plan
from autopar.report.format import plural


def order_sentence(plan: Plan) -> str:
    """One sentence where stages lie nearer to each other than replicas; '' where they do not."""
    mesh = plan.mesh
    if not mesh.stages_inside or mesh.pp == 1 or mesh.dp == 1:
        return ""
    return (
        f"Ranks lie in the order {mesh.order}: from a stage to the next it is "
        f"{plural(mesh.stride('pp'), 'rank', 'ranks')}, from a replica to the next "
        f"{mesh.stride('dp')}, so what stages send takes the nearer links and "
        "what replicas gather and reduce the farther ones (Megatron's --use-tp-pp-dp-mapping)."
    )
