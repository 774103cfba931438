"""What the page's script draws, as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from autopar.plan_document import Plan
from autopar.report.block_picture import BlockPicture, EdgePicture, OpPicture
from autopar.report.facts import MEMORY_TERMS, TIME_TERMS, Facts
from autopar.report.fold import counted, fold
from autopar.report.placements import short_module
from autopar.report.timeline import Event, simulated, split_recompute, window
from autopar.report.words import MAIN_OPS, strategy_words
from autopar.units import format_bytes, format_seconds


def page_data(
    plan: Plan, pictures: Sequence[BlockPicture], timeline: Iterable[Event] | None = None
) -> dict[str, Any]:
    """`memory`, `time`, `timeline` and `blocks`; an empty list means: nothing to draw."""
    facts = Facts.of(plan)
    again = [float(stage.get("recompute", 0.0)) for stage in facts.stage_seconds]
    events = simulated(plan) if timeline is None else timeline
    shown = window(split_recompute(events, again, plan.mesh.pp), plan.microbatches)
    data = {
        "memory": {
            "terms": list(MEMORY_TERMS),
            "limit": facts.memory_limit_bytes,
            "stages": [dict(stage) for stage in facts.memory_per_stage],
        },
        "time": [
            {"term": term, "words": words, "seconds": facts.time_breakdown.get(term, 0.0)}
            for term, words in TIME_TERMS.items()
            if facts.time_breakdown.get(term)
        ],
        "timeline": {
            "stages": plan.mesh.pp,
            "chunks": plan.chunks,
            "note": shown.note,
            "events": [
                [e.stage, e.kind, e.microbatch, e.start, e.end, e.chunk] for e in shown.events
            ],
        },
        "blocks": [graph(fold(picture)) for picture in pictures],
    }
    return dict(_finite(data))


def graph(picture: BlockPicture) -> dict[str, Any]:
    """Nodes and links of one folded block.

    A collective is a node of its own between an op and its readers, so that one transfer read by
    three ops is drawn, and counted, once. What comes from outside is a node of kind `input`.
    """
    slowest = max((op.seconds for op in picture.ops), default=0.0)
    nodes = {op.name: _op_node(op, slowest, picture) for op in picture.ops}
    links: list[tuple[str, str]] = []
    inputs = _input_nodes(picture, set(nodes))
    for edge in picture.edges:
        source = edge.source
        if source in inputs:
            source, title = inputs[source]
            nodes.setdefault(source, {"id": source, "kind": "input", "title": title, "lines": []})
        if not edge.is_local:
            middle = f"{source}|{edge.collective}|{edge.backward_collective}"
            if middle not in nodes:
                nodes[middle] = {"id": middle, **_collective_node(edge)}
                links.append((source, middle))
            source = middle
        if (source, edge.target) not in links:
            links.append((source, edge.target))
    return {"name": picture.name, "nodes": list(nodes.values()), "links": links}


def _input_nodes(picture: BlockPicture, ops: set[str]) -> dict[str, tuple[str, str]]:
    """Value from outside -> (id, title) of its node; those with the same readers share one."""
    readers: dict[str, list[tuple[str, str, str]]] = {}
    for edge in picture.edges:
        if edge.source not in ops:
            reader = (edge.target, edge.collective, edge.backward_collective)
            readers.setdefault(edge.source, []).append(reader)
    together: dict[tuple[tuple[str, str, str], ...], list[str]] = {}
    for name, read in readers.items():
        local = not any(forward or backward for _, forward, backward in read)
        key = tuple(sorted(set(read))) if local else (("", "", name),)
        together.setdefault(key, []).append(name)
    return {
        name: (f"input {names[0]}", ", ".join(names))
        for names in together.values()
        for name in names
    }


def _collective_node(edge: EdgePicture) -> dict[str, Any]:
    title = edge.collective or "identity"
    return {
        "kind": "collective",
        "title": f"{title}  {format_bytes(edge.bytes)}" if edge.bytes else title,
        "lines": [f"gradient: {edge.backward_collective or 'identity'}"],
        "only": "" if edge.collective else "backward",
    }


def _op_node(op: OpPicture, slowest: float, picture: BlockPicture) -> dict[str, Any]:
    module = short_module(op.module, picture)
    title, under = op_title(op, module)
    words = strategy_words(op.op, op.strategy, op.placement, len(op.shape))
    shape = "×".join(map(str, op.shape)) or "scalar"
    tip = [f"{op.name} ({op.op})", op.module, f"shape {shape}, {op.placement}, {op.strategy}"]
    tip.append(f"{format_seconds(op.seconds)}, {op.bound or 'no'} bound")
    tip.append(f"keeps {format_bytes(op.saved_bytes)} for the backward")
    if op.members:
        tip.append(f"folded: {', '.join(op.members)}")
    return {
        "id": op.name,
        "kind": "op",
        "main": op.op in MAIN_OPS,
        "title": title,
        "lines": [under, f"{op.placement}  {words}" if op.op in MAIN_OPS else op.placement],
        "placement": op.placement,
        "heat": op.seconds / slowest if slowest else 0.0,
        "tip": "\n".join(line for line in tip if line),
    }


def op_title(op: OpPicture, module: str) -> tuple[str, str]:
    """(title, second line): the module's own name where it says more than the operator's."""
    leaf = module.rsplit(".", 1)[-1]
    if op.op == leaf:
        return leaf, counted(["op"] * len(op.members)).replace("op ×", "") + " ops"
    if op.op in MAIN_OPS and leaf and op.op not in ("scaled_dot_product_attention",):
        return leaf, op.op
    return {"scaled_dot_product_attention": "attention (sdpa)"}.get(op.op, op.op), module


def _finite(value: Any) -> Any:
    """JSON has no infinity: None instead."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
