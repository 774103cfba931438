"""Why the ranks that split layers (tp) lie where they do, in words."""

from __future__ import annotations

from autopar.plan_document import Plan
from autopar.report.facts import Facts, mesh_text
from autopar.report.format import relative_text
from autopar.units import format_seconds


def tp_sentence(plan: Plan) -> str:
    """Whether tp stays within the innermost links, and what the next ones would cost; '' where it
    is not known, or nothing else could be chosen."""
    facts, tp = Facts.of(plan), plan.mesh.tp
    links = facts.tp_links
    if not links or plan.mesh.size == 1:
        return ""
    near = f"{links[0].get('name', '?')} {_speed(links[0])}"
    inside = int(links[0].get("ranks") or 1)
    if tp == 1:
        return f"TP is 1: no layer is split.{_price(facts, 2)}"
    if len(links) < 2:
        return f"All {plan.mesh.size} ranks are joined by one kind of links ({near})."
    far = f"{links[1].get('name', '?')} {_speed(links[1])}"
    times = float(links[0].get("bytes_per_second") or 0) / (
        float(links[1].get("bytes_per_second") or 0) or 1.0
    )
    if tp <= inside:
        return (
            f"TP stays among the {inside} ranks of a node ({near}): across nodes ({far}) large "
            f"messages take {times:.1f}× as long.{_price(facts, 2 * tp)}"
        )
    return (
        f"TP spans nodes of {inside} ranks, whose links between them ({far}) take {times:.1f}× as "
        f"long as those within ({near}).{_price(facts, inside)}"
    )


def _price(facts: Facts, tp: int) -> str:
    """What another degree would cost at the least, where that was evaluated, or why it can't be."""
    asked = [n for n in facts.neighbours if n.get("change") == f"TP {tp}"]
    # A mesh of that degree with other micro-batches or stages may be faster.
    meshes = [a for a in facts.alternatives if f"tp{tp}" in mesh_text(a.get("mesh", "")).split()]
    seconds = [s for o in (*asked, *meshes) if (s := o.get("step_seconds"))]
    if seconds and (ratio := facts.ratio(min(seconds))):
        return f" TP {tp}: at best {format_seconds(min(seconds))}, {relative_text(ratio)}."
    for other in asked:
        if other.get("fits") is False:
            return f" TP {tp} does not fit in memory."
        if other.get("why"):
            return f" TP {tp}: {other['why']}."
    return ""


def _speed(link: object) -> str:
    assert isinstance(link, dict)
    return f"{float(link.get('bytes_per_second') or 0) / 1e9:,.0f} GB/s"
