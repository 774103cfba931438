"""What a plan's predictions may hold: read by the reports alone, but never trusted by them."""

from __future__ import annotations

from typing import Any

from autopar.plan_fields import amount, change, count, entries, flag, items, text, told


def predictions(name: str, value: Any) -> dict[str, Any]:
    """The predictions as they are; raises `PlanError` where one has another type or is negative."""
    return told(
        name,
        {} if value is None else value,
        {
            "status": text,
            "decisions": text,
            "step_seconds": amount,
            "tokens_per_second_per_gpu": amount,
            "mfu": amount,
            "memory_limit_bytes": amount,
            "memory_per_stage": lambda n, v: items(n, v, _amounts),
            "time_breakdown": _amounts,
            "stage_seconds": lambda n, v: items(n, v, _amounts),
            "alternatives": lambda n, v: items(n, v, _other_plan),
            "recipes": lambda n, v: items(n, v, _other_plan),
            "neighbours": lambda n, v: items(n, v, _other_plan),
            "activation_formula": _formula,
            "memory_formulas": _memory_formulas,
            "class_seconds": _amounts,
            "heaviest_ops": lambda n, v: items(n, v, _heavy_op),
            "tp_links": lambda n, v: items(n, v, _link),
            "experts": count,
            "experts_hidden": amount,
            "copies_seconds": amount,
            "kept_gathered": _amounts,
            "search": _search,
            "reruns": lambda n, v: entries(n, v, lambda k, sets: entries(k, sets, _amounts)),
        },
    )


def _amounts(name: str, value: Any) -> dict[str, Any]:
    return entries(name, value, amount)


def _other_plan(name: str, value: Any) -> dict[str, Any]:
    return told(
        name,
        value,
        {
            **{"name": text, "change": text, "mesh": _mesh, "why": text},
            **{"fits": flag, "step_seconds": amount},
        },
    )


def _formula(name: str, value: Any) -> dict[str, Any]:
    return told(
        name,
        value,
        {"block": text, "activations": text, "count": count, "bytes": amount, "values": _counts},
    )


def _memory_formulas(name: str, value: Any) -> dict[str, Any]:
    return told(
        name,
        value,
        {
            **{"rank": count, "live": lambda n, v: items(n, v, count), "values": _counts},
            "terms": lambda n, v: entries(n, v, lambda k, parts: items(k, parts, _memory_part)),
        },
    )


def _memory_part(name: str, value: Any) -> dict[str, Any]:
    return told(name, value, {"text": text, "bytes": change})


def _heavy_op(name: str, value: Any) -> dict[str, Any]:
    return told(
        name,
        value,
        {
            **{"op": text, "module": text, "block": text, "bound": text},
            **{"count": count, "seconds": amount},
        },
    )


def _link(name: str, value: Any) -> dict[str, Any]:
    return told(name, value, {"name": text, "ranks": count, "bytes_per_second": amount})


def _counts(name: str, value: Any) -> dict[str, Any]:
    return entries(name, value, count)


def _mesh(name: str, value: Any) -> Any:
    return value if isinstance(value, str) else entries(name, value, count)


def _search(name: str, value: Any) -> dict[str, Any]:
    return told(
        name,
        value,
        {
            "bound_step_seconds": amount,
            "gap": amount,
            "shapes": count,
            "pruned": count,
            "placements_confirmed": count,
            "seconds": _amounts,
        },
    )
