"""What blocks that are recomputed in part run again, what that frees, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.plan_document import Plan, StagePlan
from autopar.report.format import percent_text, plural
from autopar.report.sequence_words import inserted_words
from autopar.units import format_bytes

OPS_SHOWN = 6


def recomputed_text(stage: StagePlan) -> str:
    """How many blocks of a stage are recomputed: `3`, `3 + 5 in part`, or '' for none."""
    whole, part = len(stage.recompute), len(stage.selective)
    texts = [str(whole)] if whole else []
    return " + ".join([*texts, *([f"{part} in part"] if part else [])])


def rerun_rows(plan: Plan) -> list[tuple[str, str]]:
    """(`set 1 of 12 blocks like model.layers.0`, `re-runs …: frees …`) of every set in use."""
    used = Counter(used_sets(plan))
    rows = []
    for kind, sets in plan.reruns.items():
        for label, ops in sets.items():
            if used[kind, label]:
                name = f"{label} of {plural(used[kind, label], 'block')} like {kind}"
                rows.append((name, rerun_text(plan, kind, label, ops)))
    return rows


def used_sets(plan: Plan) -> list[tuple[str, str]]:
    """(kind, label) of every block that is recomputed in part."""
    kind_of = {block: kind for kind, blocks in plan.kinds.items() for block in blocks}
    return [
        (kind_of.get(block, block), label)
        for stage in plan.stages
        for block, label in stage.selective.items()
    ]


def rerun_text(plan: Plan, kind: str, label: str, ops: Sequence[str]) -> str:
    """`re-runs mul ×3, to ×4, silu: frees 24 % of 612 MiB for 1.0 % of its time`."""
    text = f"re-runs {ops_text(ops)}"
    told = plan.predicted.get("reruns", {}).get(kind, {}).get(label, {})
    if not all(told.get(name) for name in ("saved_bytes", "block_seconds")):
        return text
    freed = 1 - told.get("kept_bytes", 0) / told["saved_bytes"]
    cost = told.get("seconds", 0.0) / told["block_seconds"]
    of = format_bytes(int(told["saved_bytes"]))
    return f"{text}: frees {percent_text(freed)} of {of} for {percent_text(cost)} of its time"


def ops_text(ops: Sequence[str]) -> str:
    """Ops by their kind, most first; a collective without what it moves."""
    counts = Counter(inserted_words(op.split(" ")[0].split(".")[0]) for op in ops)
    texts = [f"{name} ×{n}" if n > 1 else name for name, n in counts.most_common()]
    more = len(texts) - OPS_SHOWN
    return ", ".join([*texts[:OPS_SHOWN], *([f"{more} more"] if more > 0 else [])])
