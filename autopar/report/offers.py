"""Clusters against each other in the terminal: what a step takes and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from autopar.report.format import percent_text
from autopar.report.text import plain_table
from autopar.units import format_seconds

if TYPE_CHECKING:
    from rich.table import Table


def offers_table(rows: Sequence[Mapping[str, Any]], steps: int) -> Table:
    """Clusters against each other: a star before those that nothing beats in time and spending."""
    priced = any(row.get("cost") is not None for row in rows)
    spent = [f"cost of {steps:,} steps"] if priced else []
    hours = f"GPU-hours of {steps:,} steps"
    names = ("", "cluster", "GPUs", "step", "MFU", hours, *spent, "plan")
    table = plain_table(*names, right=2)
    table.columns[-1].justify = "left"
    for row in rows:
        if not row["fits"]:
            cells = ["-"] * (4 + len(spent)) + [str(row["why"])]
            table.add_row("", str(row["cluster"]), f"{row['gpus']:,}", *cells[1:])
            continue
        cost = [_amount(row["cost"])] if row["cost"] is not None else []
        table.add_row(
            "*" if row["frontier"] else "",
            str(row["cluster"]),
            f"{row['gpus']:,}",
            format_seconds(row["step_seconds"]),
            percent_text(row["mfu"]),
            _amount(row["gpu_hours"]),
            *cost,
            str(row["plan"]),
        )
    return table


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
