"""The static parts of the page as escaped HTML: readable even where scripts are switched off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from autopar import __version__
from autopar.plan_document import Plan
from autopar.report.block_picture import BlockPicture, OpPicture
from autopar.report.facts import TIME_TERMS, Facts, mesh_text
from autopar.report.fold import counted, fold
from autopar.report.format import count_text, flops_text, percent_text, plural
from autopar.report.limits import cost_text, ideal_bubble, limits, proof
from autopar.report.page_data import op_title
from autopar.report.placements import short_module
from autopar.report.reruns import recomputed_text
from autopar.report.text import decision_rows, span_text, stage_name
from autopar.report.words import MAIN_OPS, placement_words, strategy_words
from autopar.units import format_bytes, format_seconds

_OVER = "DOES NOT FIT"
STATUS = {"optimal": "proven optimal", "feasible": "not proven optimal"}


def parts(plan: Plan, pictures: Sequence[BlockPicture]) -> dict[str, str]:
    """Hole of the template -> HTML."""
    facts = Facts.of(plan)
    folded = [fold(picture) for picture in pictures]
    return {
        "title": escape(f"{plan.model} on {plan.cluster}"),
        "model": escape(plan.model),
        "cluster": escape(plan.cluster),
        "fingerprint": escape(plan.fingerprint),
        "version": escape(__version__),
        "status": escape(facts.status),
        "status_words": escape(STATUS.get(facts.status, facts.status)),
        "tiles": _tiles(plan, facts),
        "mesh": _mesh(plan),
        "decisions": _definitions(decision_rows(plan)[1:]),
        "time_rows": _time_rows(facts),
        "limits": _list(limits(plan) or ["The plan holds no predictions."]),
        "proof": escape(proof(plan)),
        "stages": _stage_rows(plan, facts),
        "blocks": "\n".join(_block(picture, i) for i, picture in enumerate(folded))
        or "<p class='quiet'>This page was written without the graphs of the blocks.</p>",
        "legend": _legend(folded),
        "others": _others(facts),
        "notes": _notes(plan),
    }


def _tiles(plan: Plan, facts: Facts) -> str:
    p, m = plan.mesh.pp, plan.microbatches
    tiles = []
    if facts.step_seconds is not None:
        tokens = plan.global_batch * plan.sizes.get("sequence", 0)
        under = f"{tokens:,} tokens" if tokens else f"batch {plan.global_batch:,}"
        tiles.append(("step", format_seconds(facts.step_seconds), under))
    if facts.tokens_per_second_per_gpu is not None:
        whole = count_text(facts.tokens_per_second_per_gpu * plan.mesh.size)
        tiles.append(
            (
                f"{facts.samples}/s per GPU",
                count_text(facts.tokens_per_second_per_gpu),
                f"{whole} in all",
            )
        )
    if facts.mfu is not None:
        tiles.append(("MFU", percent_text(facts.mfu), "of the peak FLOP/s"))
    if facts.peak_bytes is not None:
        limit = facts.memory_limit_bytes
        under = f"stage {facts.fullest_stage}"
        if limit:
            used = percent_text(facts.peak_bytes / limit)
            fits = "fits" if facts.peak_bytes <= limit else _OVER
            under = f"{fits}: {used} of {format_bytes(limit)}, {under}"
        tiles.append(("memory, fullest rank", format_bytes(facts.peak_bytes), under))
    if facts.time_breakdown:
        v = plan.chunks
        chunks = f", v={v}" if v > 1 else ""
        ideal = f"ideal {percent_text(ideal_bubble(p, m, v))} for p={p}, m={m}{chunks}"
        under = ideal if p > 1 else "no pipeline"
        tiles.append(("bubble", percent_text(facts.share("bubble")), under))
    gap = facts.search.get("gap")
    if gap is not None:
        bound = facts.search.get("bound_step_seconds")
        under = f"bound {format_seconds(bound)}" if bound is not None else ""
        tiles.append(("optimality gap", percent_text(gap), under))
    return "".join(
        f'<div class="tile{" bad" if under.startswith(_OVER) else ""}"><span>{escape(name)}</span>'
        f"<b>{escape(value)}</b><small>{escape(under)}</small></div>"
        for name, value, under in tiles
    )


def _mesh(plan: Plan) -> str:
    names = {"pp": "pipeline", "dp": "data", "cp": "context", "tp": "tensor"}
    if plan.mesh.cp == 1:
        names.pop("cp")
    axes = (
        f'<div class="axis{" one" if plan.mesh.degree(axis) == 1 else ""}">'
        f"<b>{plan.mesh.degree(axis)}</b><span>{axis}</span><small>{name}</small></div>"
        for axis, name in names.items()
    )
    number, word = plural(plan.mesh.size, "rank").split(" ")
    ranks = f'<div class="ranks">= <b>{number}</b> {word}</div>'
    if plan.mesh.ep > 1:
        ranks += f'<div class="ranks"><b>ep {plan.mesh.ep}</b> within the replicas</div>'
    if plan.mesh.dp_replicate > 1:
        ranks += f'<div class="ranks">ZeRO shards over <b>{plan.mesh.dp_shard}</b> replicas</div>'
    return '<i class="times">×</i>'.join(axes) + ranks


def _definitions(rows: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)


def _list(sentences: Iterable[str]) -> str:
    return "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)


def _time_rows(facts: Facts) -> str:
    rows = []
    for term, words in TIME_TERMS.items():
        seconds = facts.time_breakdown.get(term)
        if seconds:
            rows.append(
                f'<tr><td><i class="swatch t-{term}"></i>{escape(words)}</td>'
                f"<td>{format_seconds(seconds)}</td><td>{percent_text(facts.share(term))}</td></tr>"
            )
    return "".join(rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """`rows` hold HTML; from column `words` on cells are numbers, aligned to the right."""
    css = ["" if i < words else ' class="n"' for i in range(len(head))]
    top = "".join(f"<th{c}>{escape(h)}</th>" for h, c in zip(head, css, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{cell}</td>" for cell, c in zip(row, css, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _stage_rows(plan: Plan, facts: Facts) -> str:
    rows = []
    for index, stage in enumerate(plan.stages):
        times = facts.stage_seconds[index] if index < len(facts.stage_seconds) else {}
        shown = [format_seconds(times[k]) if k in times else "–" for k in ("forward", "backward")]
        recompute = escape(recomputed_text(stage)) or "–"
        rows.append([stage_name(plan, index), escape(span_text(stage.blocks)), recompute, *shown])
    return _table(("stage", "blocks", "recomputed", "forward", "backward"), rows, words=2)


def _block(picture: BlockPicture, index: int) -> str:
    # As drawn: edges of one source with the same collectives are one transfer.
    transfers = {(e.source, e.collective, e.backward_collective) for e in picture.edges}
    sent = counted(sorted(forward for _, forward, _ in transfers if forward))
    back = counted(sorted(backward for _, _, backward in transfers if backward))
    talk = f"forward: {sent or 'no collective'}; backward: {back or 'no collective'}"
    return (
        f'<article class="block"><h3>{escape(picture.name)} <em>× {picture.count:,}</em>'
        f"<small>{escape(talk)}</small></h3>"
        f'<div class="pair"><div class="graph" id="graph-{index}"></div>'
        f'<div class="ops">{_ops(picture)}</div></div></article>'
    )


def _ops(picture: BlockPicture) -> str:
    rows = []
    for op in picture.ops:
        title, under = op_title(op, short_module(op.module, picture))
        words = strategy_words(op.op, op.strategy, op.placement, len(op.shape))
        weight = "b" if op.op in MAIN_OPS else "span"
        rows.append([
            f"<{weight}>{escape(title)}</{weight}><small>{escape(under)}</small>",
            f"{_chip(op)}<small>{escape(words)}</small>",
            escape("×".join(map(str, op.shape)) or "scalar"),
            flops_text(op.flops) if op.flops else "–",
            f"{format_seconds(op.seconds)}<small>{escape(op.bound)}</small>" if op.seconds else "–",
            format_bytes(op.saved_bytes) if op.saved_bytes else "–",
        ])  # fmt: skip
    head = ("op", "placement on tp", "global shape", "FLOPs", "time", "kept for backward")
    return _table(head, rows, words=2)


def _chip(op: OpPicture) -> str:
    return f'<i class="chip {placement_class(op.placement)}">{escape(op.placement)}</i>'


def placement_class(placement: str) -> str:
    """CSS class of a placement's colour: `p-r`, `p-rg`, `p-p`, `p-s0` to `p-s4`."""
    if placement.startswith("S(") and placement[2:-1].isdigit():
        return f"p-s{int(placement[2:-1]) % 5}"
    return {"R": "p-r", "R*": "p-rg", "P": "p-p"}.get(placement, "p-r")


def _legend(pictures: Sequence[BlockPicture]) -> str:
    used = sorted({op.placement for picture in pictures for op in picture.ops})
    return "".join(
        f'<span><i class="chip {placement_class(p)}">{escape(p)}</i> '
        f"{escape(placement_words(p))}</span>"
        for p in used
    )


def _others(facts: Facts) -> str:
    rows = [(f"plain {recipe.get('name', '?')}", "recipe", recipe) for recipe in facts.recipes] + [
        (mesh_text(other.get("mesh", "?")), "searched", other) for other in facts.alternatives
    ]
    rows += [(str(n.get("change", "?")), "one change", n) for n in facts.neighbours]
    if not rows:
        return "<p class='quiet'>The plan lists no other plans.</p>"
    cells = []
    for name, kind, other in rows:
        seconds = other.get("step_seconds")
        step, words = "–", cost_text(facts, other)
        if other.get("fits") is not False and seconds is not None:
            step = format_seconds(seconds)
            words = words.removeprefix(step).lstrip(",; ")
        cells.append([escape(name), kind, escape(words), step])
    if facts.step_seconds is not None:
        cells.insert(
            0, ["<b>this plan</b>", "", "", f"<b>{format_seconds(facts.step_seconds)}</b>"]
        )
    return _table(("plan", "", "against this plan", "step"), cells, words=3)


def _notes(plan: Plan) -> str:
    if not plan.notes:
        return "<p class='quiet'>None.</p>"
    return f"<ul>{_list(plan.notes)}</ul>"
