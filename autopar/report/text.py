"""A plan in the terminal: `show` prints all of it, `explain` says in sentences what limits it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.plan_document import Plan
from autopar.report.block_picture import BlockPicture
from autopar.report.expert_words import expert_part
from autopar.report.facts import MEMORY_TERMS, TIME_TERMS, Facts, mesh_text
from autopar.report.format import count_text, percent_text, plural
from autopar.report.limits import cost_text, limits, others, proof
from autopar.report.memory_words import memory_lines, memory_title
from autopar.report.neighbour_words import neighbours, neighbours_title
from autopar.report.op_words import heaviest
from autopar.report.placements import block_words
from autopar.report.reruns import recomputed_text, rerun_rows
from autopar.report.schedule_words import schedule_text
from autopar.report.sequence_words import SHORT, attention_ways, part_text
from autopar.report.shard_words import kept_text, zero_text
from autopar.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Group, RenderableType
    from rich.table import Table


def show(plan: Plan, pictures: Sequence[BlockPicture] = ()) -> Group:
    """Everything about the plan, for `rich.print`. Pictures replace graph names by module names."""
    from rich.console import Group
    from rich.text import Text

    facts = Facts.of(plan)
    title = Text.assemble((plan.model, "bold"), " on ", (plan.cluster, "bold"), f"  {facts.status}")
    parts: list[RenderableType] = [title]
    results = result_rows(facts)
    if results:
        parts.append(Text.assemble(*_joined(results)))
    parts += [_decisions(plan), _stages(plan, facts)]
    if facts.memory_per_stage:
        parts.append(_memory(plan, facts))
    if facts.time_breakdown:
        parts.append(_times(facts))
    if plan.mesh.tp > 1:
        parts.append(_placements(plan, pictures, "tp"))
    if plan.mesh.cp > 1:
        parts.append(_placements(plan, pictures, "cp"))
    if facts.recipes or facts.alternatives:
        parts.append(_others(facts))
    parts += [Text(proof(plan)), *(Text(f"note: {note}") for note in plan.notes)]
    spaced: list[RenderableType] = []
    for part in parts:
        spaced += [part, Text()]
    return Group(*spaced[:-1])


def explain(plan: Plan) -> str:
    """What limits the plan, why not its neighbours, and how sure that is; plain text."""
    told = limits(plan)
    if not told:
        return "This plan holds no predictions. Make it with `autopar plan` to have it explained.\n"
    lines = [f"{plan.model} on {plan.cluster}: {headline(plan)}.", "", "What limits it:"]
    lines += [f"  - {sentence}" for sentence in told]
    for title, sentences in (
        (memory_title(plan), memory_lines(plan)),
        ("Heaviest ops, on the rank that has the most of them:", heaviest(plan)),
        ("Why this one:", others(plan)),
        (neighbours_title(plan), neighbours(plan)),
    ):
        if sentences:
            lines += ["", title, *(f"  - {sentence}" for sentence in sentences)]
    lines += ["", proof(plan)]
    if plan.notes:
        lines += ["", "Notes:", *(f"  - {note}" for note in plan.notes)]
    return "\n".join(lines) + "\n"


def headline(plan: Plan) -> str:
    """`pp4 dp1 tp8, 32 micro-batches of 1, 1F1B, ZeRO-1, recompute none`."""
    return ", ".join(
        (
            str(plan.mesh),
            f"{plural(plan.microbatches, 'micro-batch', 'micro-batches')} of {plan.microbatch}",
            *([schedule_name(plan)] if plan.mesh.pp > 1 else []),
            f"ZeRO-{plan.zero}{kept_text(plan)}",
            f"recompute {plan.recompute_label}",
        )
    )


def schedule_name(plan: Plan) -> str:
    return schedule_text(plan.schedule, plan.chunks)


def stage_name(plan: Plan, stage: int) -> str:
    """The number of a stage, and of the pp rank that holds it where ranks hold several."""
    return str(stage) if plan.chunks == 1 else f"{stage} (rank {plan.pp_rank(stage)})"


def holder(plan: Plan) -> str:
    """What a row of memory or of the timeline is of: a stage, or a rank that holds several."""
    return "stage" if plan.chunks == 1 else "rank"


def decision_rows(plan: Plan) -> list[tuple[str, str]]:
    """(name, value) of every decision above the level of a block."""
    sizes = ", ".join(f"{k} {v:,}" for k, v in plan.sizes.items())
    batch = plural(plan.microbatches, "micro-batch", "micro-batches")
    return [
        ("mesh", f"{plan.mesh}  ({plural(plan.mesh.size, 'rank')})"),
        ("batch", f"{batch} of {plan.microbatch} per replica, {plan.global_batch:,} in all"),
        ("schedule", schedule_name(plan) if plan.mesh.pp > 1 else "no pipeline"),
        ("ZeRO", zero_text(plan)),
        ("recompute", plan.recompute_label),
        ("between blocks", plan.boundary),
        *([("sequence", sequence_text(plan))] if plan.mesh.cp > 1 else []),
        *([("experts", f"{expert_part(plan)} on each ep rank")] if plan.mesh.ep > 1 else []),
        *([("spare slots", spare_text(plan))] if plan.spare_experts else []),
        ("precision", plan.precision),
        ("optimizer", plan.optimizer),
        ("planned for", sizes),
    ]


def spare_text(plan: Plan) -> str:
    """The room for copies of experts, and for unequal counts, in a line."""
    return f"{plan.spare_experts} on each rank, where ranks split a layer's experts"


def sequence_text(plan: Plan) -> str:
    """How cp splits it, in a line."""
    ways = attention_ways(plan, SHORT)
    told = f"; attention {', '.join(ways)}" if ways else ""
    return f"{part_text(plan)} on each cp rank{told}"


def result_rows(facts: Facts) -> list[tuple[str, str]]:
    """(name, value) of what the plan is predicted to do; only what is known."""
    rows = []
    if facts.step_seconds is not None:
        rows.append(("step", format_seconds(facts.step_seconds)))
    if facts.tokens_per_second_per_gpu is not None:
        rows.append((f"{facts.samples}/s per GPU", count_text(facts.tokens_per_second_per_gpu)))
    if facts.mfu is not None:
        rows.append(("MFU", percent_text(facts.mfu)))
    if facts.peak_bytes is not None:
        text = format_bytes(facts.peak_bytes)
        if facts.memory_limit_bytes:
            text += f" of {format_bytes(facts.memory_limit_bytes)}"
        rows.append(("memory, fullest rank", text))
    return rows


def _joined(rows: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """One line of figures: pieces of text with their styles."""
    pieces: list[tuple[str, str]] = []
    for name, value in rows:
        pieces += [("   " if pieces else "", ""), (f"{name} ", "dim"), (value, "bold")]
    return pieces


def plain_table(*columns: str, title: str = "", right: int = 1) -> Table:
    """The first `right` columns are words, the others are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < right else "right")
    return table


def _decisions(plan: Plan) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in decision_rows(plan):
        table.add_row(Text(name, "dim"), Text(value))
        for label, text in rerun_rows(plan) if name == "recompute" else ():
            table.add_row(Text(""), Text(f"{label} {text}"))
    return table


def _stages(plan: Plan, facts: Facts) -> Table:
    table = plain_table("stage", "blocks", "recomputed", "forward", "backward", right=2)
    for index, stage in enumerate(plan.stages):
        times = facts.stage_seconds[index] if index < len(facts.stage_seconds) else {}
        table.add_row(
            stage_name(plan, index),
            span_text(stage.blocks),
            recomputed_text(stage) or "-",
            *(format_seconds(times[k]) if k in times else "-" for k in ("forward", "backward")),
        )
    return table


def _memory(plan: Plan, facts: Facts) -> Table:
    table = plain_table("memory", *(_SHORT.get(k, k) for k in MEMORY_TERMS), "total", "of limit")
    for index, stage in enumerate(facts.memory_per_stage):
        row = [format_bytes(stage[k]) for k in (*MEMORY_TERMS, "total")]
        limit = facts.memory_limit_bytes
        row.append(percent_text(stage["total"] / limit) if limit else "-")
        fullest = index == facts.fullest_stage and len(facts.memory_per_stage) > 1
        table.add_row(f"{holder(plan)} {index}", *row, style="bold" if fullest else "")
    return table


_SHORT = {"parameters": "params", "gradients": "grads", "activations": "activ."}


def span_text(blocks: Sequence[str]) -> str:
    """`embed … layers.7 (9)`."""
    if len(blocks) <= 2:
        return ", ".join(blocks) or "-"
    return f"{blocks[0]} … {blocks[-1]} ({len(blocks)})"


def _times(facts: Facts) -> Table:
    table = plain_table("where the step goes", "time", "share", "")
    table.columns[3].justify = "left"
    for term, words in TIME_TERMS.items():
        seconds, share = facts.time_breakdown.get(term, 0.0), facts.share(term)
        if seconds:
            bar = "█" * round(share * 40) or "▏"
            table.add_row(words, format_seconds(seconds), percent_text(share), bar)
    return table


def _placements(plan: Plan, pictures: Sequence[BlockPicture], axis: str) -> Table:
    table = plain_table("block", "×", f"on the {axis} axis", "ops", right=4)
    for block in block_words(plan, pictures, axis):
        label, count = block.name, str(block.count)
        for words, ops in block.main:
            table.add_row(label, count, words, ops)
            label = count = ""
        if block.rest:
            table.add_row(label, count, "the other ops", block.rest)
    return table


def _others(facts: Facts) -> Table:
    table = plain_table("other plans", "step", "against this plan", right=1)
    table.columns[2].justify = "left"
    others = [(f"plain {r.get('name', '?')}", r) for r in facts.recipes]
    others += [(mesh_text(a.get("mesh", "?")), a) for a in facts.alternatives]
    for name, other in others:
        seconds = other.get("step_seconds")
        step, words = "-", cost_text(facts, other)
        if other.get("fits") is not False and seconds is not None:
            step = format_seconds(seconds)
            words = words.removeprefix(step).lstrip(",; ")
        table.add_row(name, step, words)
    return table
