"""Two plans side by side: the decisions that differ and what that costs or saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.plan_document import Plan
from autopar.report.facts import MEMORY_TERMS, TIME_TERMS, Facts
from autopar.report.format import count_text, percent_text
from autopar.report.reruns import ops_text
from autopar.report.sequence_words import inserted_words, on_cp_words
from autopar.report.text import decision_rows
from autopar.report.words import op_of, placement_words, rank_of, strategy_words
from autopar.units import format_bytes, format_seconds

MOST_LINES = 12


def diff(plan_a: Plan, plan_b: Plan) -> str:
    """Text of two columns, `a` and `b`; equal decisions are left out. Ends with a newline."""
    lines: list[str] = []
    if (plan_a.model, plan_a.fingerprint) != (plan_b.model, plan_b.fingerprint):
        lines.append(
            f"These plans are for different programs: {plan_a.model} ({plan_a.fingerprint}) "
            f"and {plan_b.model} ({plan_b.fingerprint})."
        )
    decisions = _decisions(plan_a, plan_b) + _cuts(plan_a, plan_b)
    strategies = _strategies(plan_a, plan_b)
    if decisions:
        lines += _columns("decision", [(n, a, b, "") for n, a, b in decisions])
    if strategies:
        lines += ["", *_columns("strategy", strategies[:MOST_LINES])]
        if len(strategies) > MOST_LINES:
            lines.append(f"… and {len(strategies) - MOST_LINES} more ops")
    if not decisions and not strategies:
        lines.append("The two plans decide the same.")
    predictions = _predictions(Facts.of(plan_a), Facts.of(plan_b))
    if predictions:
        lines += ["", *_columns("prediction", predictions)]
    return "\n".join(lines) + "\n"


def _decisions(a: Plan, b: Plan) -> list[tuple[str, str, str]]:
    rows = [("cluster", a.cluster, b.cluster)]
    first, second = dict(decision_rows(a)), dict(decision_rows(b))
    # Only plans with cp tell how the sequence is split.
    rows += [(n, first.get(n, "whole"), second.get(n, "whole")) for n in {**first, **second}]
    return [(name, x, y) for name, x, y in rows if x != y]


def _cuts(a: Plan, b: Plan) -> list[tuple[str, str, str]]:
    """Stage cuts and recomputed blocks, as counts per stage."""
    rows = []
    fields = {
        "blocks per stage": "blocks",
        "recomputed blocks": "recompute",
        "blocks recomputed in part": "selective",
        "blocks kept gathered": "keep_gathered",
    }
    for name, field in fields.items():
        x, y = ([getattr(stage, field) for stage in plan.stages] for plan in (a, b))
        if x != y:
            texts = [" ".join(str(len(stage)) for stage in side) for side in (x, y)]
            if texts[0] == texts[1]:
                texts = ["; ".join(_named(stage) or "-" for stage in side) for side in (x, y)]
            rows.append((name, texts[0], texts[1]))
    for kind in dict.fromkeys((*a.reruns, *b.reruns)):
        sets = [p.reruns.get(kind, {}) for p in (a, b)]
        for label in dict.fromkeys((*sets[0], *sets[1])):
            if sets[0].get(label) != sets[1].get(label):
                texts = [ops_text(s[label]) if label in s else "absent" for s in sets]
                rows.append((f"{kind}: {label} re-runs", texts[0], texts[1]))
    return rows


def _named(stage: Mapping[str, str] | Sequence[str]) -> str:
    """Names of blocks, with the label of their set if they have one."""
    if isinstance(stage, Mapping):
        return ",".join(f"{block} {label}" for block, label in stage.items())
    return ",".join(stage)


def _strategies(a: Plan, b: Plan) -> list[tuple[str, str, str, str]]:
    rows = []
    axes = (("", a.placements, b.placements), (" on cp", a.cp_placements, b.cp_placements))
    for axis, first, second in axes:
        for block in dict.fromkeys((*first, *second)):
            x, y = first.get(block, {}), second.get(block, {})
            for op in dict.fromkeys((*x, *y)):
                if x.get(op) != y.get(op):
                    one, other = (_strategy(op, of, cp=bool(axis)) for of in (x, y))
                    rows.append((f"{block}: {inserted_words(op)}{axis}", one, other, ""))
    # What people look for first: products, attention, losses.
    return sorted(rows, key=lambda row: rank_of(op_of(row[0].split(": ")[1].split(" ")[0])))


def _strategy(op: str, strategies: Mapping[str, str], *, cp: bool) -> str:
    """In the field's words; a block that is not split over the axis has none."""
    if op not in strategies:
        return "no such op" if strategies else "whole"
    kind, strategy = op_of(op.split(" ")[0]), strategies[op]
    if kind == "parameter":
        return placement_words(strategy)
    return on_cp_words(kind, strategy) if cp else strategy_words(kind, strategy)


def _predictions(a: Facts, b: Facts) -> list[tuple[str, str, str, str]]:
    rows = [_row("step", a.step_seconds, b.step_seconds, format_seconds)]
    rates = a.tokens_per_second_per_gpu, b.tokens_per_second_per_gpu
    if a.samples == b.samples:  # else they are of different things
        rows.append(_row(f"{a.samples}/s per GPU", *rates, count_text))
    rows.append(_row("MFU", a.mfu, b.mfu, percent_text))
    for term, words in TIME_TERMS.items():
        x, y = a.time_breakdown.get(term), b.time_breakdown.get(term)
        if x or y:
            rows.append(_row(f"  {words}", x, y, format_seconds))
    rows.append(_row("memory, fullest rank", a.peak_bytes, b.peak_bytes, format_bytes))
    for term in MEMORY_TERMS:
        x, y = (_at_fullest(side, term) for side in (a, b))
        if x or y:
            rows.append(_row(f"  {term}", x, y, format_bytes))
    return [row for row in rows if row[1:3] != ("-", "-")]


def _at_fullest(facts: Facts, term: str) -> float | None:
    at = facts.fullest_stage
    return None if at is None else facts.memory_per_stage[at][term]


def _row(
    name: str, a: float | None, b: float | None, text: Callable[[float], str]
) -> tuple[str, str, str, str]:
    change = ""
    if a is not None and b is not None:
        change = "same" if a == b else f"{(b / a - 1) * 100:+.1f} %" if a else "new"
    return (name, "-" if a is None else text(a), "-" if b is None else text(b), change)


def _columns(title: str, rows: list[tuple[str, str, str, str]]) -> list[str]:
    table = [(title, "a", "b", "a → b" if any(r[3] for r in rows) else ""), *rows]
    widths = [max(len(row[i]) for row in table) for i in range(3)]
    return [
        "  ".join((*(c.ljust(w) for c, w in zip(row[:3], widths, strict=True)), row[3])).rstrip()
        for row in table
    ]
