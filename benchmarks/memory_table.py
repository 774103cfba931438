"""Rows of the memory benchmarks: what a plan predicts for a rank, and what was measured."""

from __future__ import annotations

from autopar.plan_document import Plan
from autopar.report.text import headline
from autopar.runtime.live_bytes import TERMS, TIE, Peak

MIB = 2**20
HEADER = [
    f"| plan | stage | {' | '.join(TERMS)} | total | error | fullest moment |",
    "| --- | --- |" + " --- |" * (len(TERMS) + 3),
]


def error(plan: Plan, stage: int, peak: Peak) -> float:
    """Predicted over measured bytes, less 1."""
    return float(plan.predicted["memory_per_stage"][stage]["total"] / peak.total - 1)


def row(plan: Plan, stage: int, peak: Peak, name: str = "") -> str:
    """One line: predicted / measured MiB of each term, and in total. Of moments that are as full
    as the fullest, the terms are those of the nearest to what was predicted."""
    predicted = plan.predicted["memory_per_stage"][stage]
    measured = peak.nearest(predicted)
    figures = [f"{predicted[t] / MIB:,.1f} / {measured[t] / MIB:,.1f}" for t in TERMS]
    total = f"{predicted['total'] / MIB:,.1f} / {peak.total / MIB:,.1f}"
    moment = peak.moment if plan.microbatches > 1 else peak.moment.removesuffix(" 1")
    cells = [name or headline(plan), str(stage), *figures, total]
    return "| " + " | ".join([*cells, f"{error(plan, stage, peak):+.1%}", moment]) + " |"


def terms_within(plan: Plan, stage: int, peak: Peak) -> int:
    """How many of the five terms are within 10 % of what was measured, or 1 % of the peak."""
    predicted = plan.predicted["memory_per_stage"][stage]
    measured = peak.nearest(predicted)
    off = {t: abs(predicted[t] - measured[t]) for t in TERMS}
    return sum(off[t] <= max(0.1 * measured[t], 0.01 * peak.total) for t in TERMS)


def summary(errors: list[float], terms: list[int]) -> str:
    """How large the errors are, under-predictions apart; `terms`: those within 10 % per stage."""
    sizes = sorted(abs(e) for e in errors)
    within = sum(e <= 0.05 for e in sizes)
    return (
        f"{len(sizes)} stages: median error {sizes[len(sizes) // 2]:.1%}, largest "
        f"{sizes[-1]:.1%}, most under-predicted {min(errors):+.1%}, {within} within 5 %.\nOf their "
        f"{len(TERMS) * len(terms)} terms {sum(terms)} are within 10 % (or 1 % of the peak)"
        f", at the\nfullest moment, or one within {TIE:.0%} of it."
    )
