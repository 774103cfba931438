"""What limits a plan and why not its neighbours, in sentences with numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.interleaving import DIVIDED
from autopar.plan_document import Plan
from autopar.report.expert_words import copies_sentence, expert_sentence
from autopar.report.facts import MEMORY_TERMS, TIME_TERMS, Facts, mesh_text
from autopar.report.format import percent_text, plural, relative_text
from autopar.report.op_words import class_sentence
from autopar.report.order_words import order_sentence
from autopar.report.reruns import rerun_rows
from autopar.report.sequence_words import sequence_sentence
from autopar.report.shard_words import groups_text, kept_sentence, shard_sentence
from autopar.report.tp_words import tp_sentence
from autopar.units import format_bytes, format_seconds


def limits(plan: Plan) -> list[str]:
    """Sentences, the most important first; empty when the plan has no predictions."""
    facts = Facts.of(plan)
    found = [_edited(plan), _largest(facts), class_sentence(plan), _bubble(plan, facts)]
    found += _communication(plan, facts)
    found += [
        tp_sentence(plan),
        order_sentence(plan),
        sequence_sentence(plan),
        expert_sentence(plan),
        copies_sentence(plan),
        shard_sentence(plan),
        kept_sentence(plan),
        _recompute(plan, facts),
        _memory(plan, facts),
        _activations(facts),
    ]
    return [sentence for sentence in found if sentence]


def ideal_bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """Idle fraction of a balanced pipeline: (p-1)/(m+p-1); with v chunks (p-1)/(vm+p-1)."""
    return (ranks - 1) / (chunks * microbatches + ranks - 1)


def divided_bubble(ranks: int, microbatches: int, chunks: int) -> float:
    """The same of zero-bubble where a forward and both halves of a backward take as long:
    (p-1)/(3vm+p-1)."""
    return ideal_bubble(ranks, 3 * microbatches, chunks)


def bubble(facts: Facts) -> float:
    """Idle fraction while the pipeline runs: without optimizer step and DP communication."""
    outside = ("optimizer", "dp_comm")
    total = sum(v for k, v in facts.time_breakdown.items() if k not in outside)
    return facts.time_breakdown.get("bubble", 0.0) / total if total else 0.0


def _edited(plan: Plan) -> str:
    if not plan.is_edited:
        return ""
    return (
        "The decisions of this plan were changed since it was made: all numbers here are those of "
        "the plan as it was (`autopar evaluate` and `autopar plan --pin` price a changed one)."
    )


def _largest(facts: Facts) -> str:
    if not facts.time_breakdown or facts.step_seconds is None:
        return ""
    ranked = sorted(facts.time_breakdown, key=lambda k: -facts.time_breakdown[k])
    first, second = ranked[0], ranked[1]
    seconds = format_seconds(facts.time_breakdown[first])
    text = (
        f"{TIME_TERMS[first][:1].upper()}{TIME_TERMS[first][1:]} "
        f"takes {percent_text(facts.share(first))} of the step "
        f"({seconds} of {format_seconds(facts.step_seconds)})"
    )
    if facts.share(second) >= 0.001:
        text += f"; next is {TIME_TERMS[second]} with {percent_text(facts.share(second))}"
    return text + "."


def _bubble(plan: Plan, facts: Facts) -> str:
    p, m = plan.mesh.pp, plan.microbatches
    if p == 1 or not facts.time_breakdown:
        return ""
    v = plan.chunks
    real, ideal = bubble(facts), ideal_bubble(p, m, v)
    what = f"{p} stages" if v == 1 else f"{p} ranks with {v} chunks each"
    formula = "(p-1)/(m+p-1)" if v == 1 else "(p-1)/(vm+p-1)"
    text = (
        f"The pipeline idles {percent_text(real)} of its time; a perfectly balanced one of "
        f"{what} and {plural(m, 'micro-batch', 'micro-batches')} idles "
        f"{formula} = {percent_text(ideal)}."
    )
    if plan.schedule in DIVIDED:
        halves = percent_text(divided_bubble(p, m, v))
        text += (
            f" With its backwards divided, in halves as long as a forward, it would be "
            f"(p-1)/(3vm+p-1) = {halves}."
        )
    if v > 1:
        one = percent_text(ideal_bubble(p, m))
        sends = format_seconds(facts.time_breakdown.get("pp_comm", 0.0))
        text += f" With one chunk it would be {one}; {v} chunks send {v} times as much ({sends})."
    stages = [float(s.get("forward", 0) + s.get("backward", 0)) for s in facts.stage_seconds]
    held = [plan.stage_indexes(rank) for rank in range(p)]
    loads = [sum(stages[i] for i in some) for some in held] if stages else []
    if len(loads) > 1 and sum(loads) > 0:
        slowest, mean = max(range(len(loads)), key=loads.__getitem__), sum(loads) / len(loads)
        over = loads[slowest] / mean - 1
        if over >= 0.005:
            text += (
                f" {_holder(plan)} {slowest} sets the pace with {format_seconds(loads[slowest])} "
                f"per micro-batch, {percent_text(over)} above the mean of the "
                f"{_holder(plan).lower()}s: {_imbalance(facts, m * (loads[slowest] - mean))}."
            )
        else:
            text += f" The {_holder(plan).lower()}s are balanced within 0.5 %."
    return text


def _imbalance(facts: Facts, seconds: float) -> str:
    """What the slowest one does more than the mean, which the others wait for."""
    share = seconds / facts.step_seconds if facts.step_seconds else 0.0
    return f"imbalance costs {format_seconds(seconds)}, {percent_text(share)} of the step"


def _holder(plan: Plan) -> str:
    """What has a load and a memory of its own."""
    return "Stage" if plan.chunks == 1 else "Rank"


def _communication(plan: Plan, facts: Facts) -> list[str]:
    found = []
    axes = (
        ("tp", "inside the layers"),
        ("cp", "along the sequence"),
        ("ep", "to experts and back"),
    )
    for axis, what in (*axes, ("dp", "for gradients and parameters")):
        share = facts.share(f"{axis}_comm")
        degree = plan.mesh.replicas if axis == "dp" else plan.mesh.degree(axis)
        if degree > 1 and f"{axis}_comm" in facts.time_breakdown:
            where = f"over {degree} ranks{groups_text(plan.mesh) if axis == 'dp' else ''}"
            found.append(
                f"Exposed {axis.upper()} communication {what} {where} costs "
                f"{percent_text(share)} of the step "
                f"({format_seconds(facts.time_breakdown[f'{axis}_comm'])})."
            )
    return found


def _recompute(plan: Plan, facts: Facts) -> str:
    share = facts.share("recompute")
    if not share:
        return ""
    label = plan.recompute_label.replace("full", "all blocks").replace("selective", "all in part")
    text = f"Recomputing {label} in the backward costs {percent_text(share)} of the step"
    rows = rerun_rows(plan)
    if not rows:
        return f"{text}; their activations are not kept."
    return f"{text}: {'; '.join(f'{name} {value}' for name, value in rows)}."


def _memory(plan: Plan, facts: Facts) -> str:
    at, limit = facts.fullest_stage, facts.memory_limit_bytes
    if at is None:
        return ""
    stage = facts.memory_per_stage[at]
    largest = max(MEMORY_TERMS, key=lambda k: stage[k])
    where = (
        f"{_holder(plan)} {at} is the fullest"
        if len(facts.memory_per_stage) > 1
        else "A rank holds"
    )
    text = f"{where}: {format_bytes(stage['total'])}"
    if limit:
        text += f" of {format_bytes(limit)} ({percent_text(stage['total'] / limit)})"
    part = stage[largest] / stage["total"] if stage["total"] else 0.0
    verdict = ""
    if limit:
        free = limit - stage["total"]
        verdict = (
            f", {format_bytes(free)} free" if free >= 0 else f", {format_bytes(-free)} TOO MUCH"
        )
    return f"{text}, {percent_text(part)} of it {largest}{verdict}."


def _activations(facts: Facts) -> str:
    """The formula of what a layer keeps, beside its number."""
    formula = facts.activation_formula
    if not formula:
        return ""
    values = ", ".join(f"{k} = {v:,}" for k, v in (formula.get("values") or {}).items())
    return (
        f"A micro-batch keeps in {formula.get('block', '?')} (×{formula.get('count', '?')}), where "
        f"it is not recomputed: {formula.get('activations', '?')} bytes = "
        f"{format_bytes(float(formula.get('bytes') or 0))} with {values}."
    )


# In notes of what the search left out although it could be pinned.
_NOT_ALL = ("can be pinned", "those are searched", "are kept gathered", "many divisors")


def proof(plan: Plan) -> str:
    """One line: how good the plan is known to be, and what was looked at."""
    facts = Facts.of(plan)
    search = facts.search
    bound, gap = search.get("bound_step_seconds"), search.get("gap")
    parts = [
        {
            "optimal": "Proven optimal in the cost model",
            "feasible": "Not proven optimal",
            "infeasible": "Infeasible",
        }.get(facts.status, f"Status: {facts.status}")
    ]
    if bound is not None:
        which = " with these pins" if search.get("pins") else ""
        some = any(mark in note for note in plan.notes for mark in _NOT_ALL)
        which += " that was searched" if some else ""
        told = " (the notes say what was not)" if some else ""
        parts.append(f"no plan{which} is faster than {format_seconds(bound)}{told}")
    if gap is not None:
        parts.append(f"gap {percent_text(gap)}")
    if search.get("shapes") is not None:
        looked = plural(int(search["shapes"]), "mesh shape")
        pruned = f", {int(search['pruned']):,} pruned by bound" if search.get("pruned") else ""
        parts.append(f"{looked} explored{pruned}")
    if confirmed := search.get("placements_confirmed"):
        parts.append(f"{plural(int(confirmed), 'placement')} confirmed by a second solver (HiGHS)")
    seconds = search.get("seconds") or {}
    if seconds:
        spent = ", ".join(f"{k} {format_seconds(float(v))}" for k, v in seconds.items())
        parts.append(f"{format_seconds(sum(map(float, seconds.values())))} ({spent})")
    return "; ".join(parts) + "."


def others(plan: Plan, most: int = 5) -> list[str]:
    """Why not the other ones: other mesh shapes, fastest first, then the plain recipes."""
    facts = Facts.of(plan)
    found = []
    for other in facts.alternatives[:most]:
        found.append(f"Not {mesh_text(other.get('mesh', '?'))}: {cost_text(facts, other)}")
    for recipe in facts.recipes:
        found.append(f"Plain {recipe.get('name', '?')}: {cost_text(facts, recipe)}")
    return [sentence(text) for text in found]


def sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith(".") else text + "."


def cost_text(facts: Facts, other: Mapping[str, Any]) -> str:
    """`12.4 s, 8.0 % slower; more bubble`, or that it does not fit."""
    seconds, why = other.get("step_seconds"), str(other.get("why") or "")
    ratio = facts.ratio(seconds)
    if other.get("fits") is False:
        parts = ["does not fit in memory"]
    elif seconds is None:
        parts = [] if why else ["not possible"]
    else:
        parts = [format_seconds(seconds)]
        if ratio is not None:
            parts[0] += f", {relative_text(ratio)}"
    return "; ".join([*parts, *([why] if why else [])])
