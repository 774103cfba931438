"""docs/validation.md: what the predictions are worth, in tables."""

from __future__ import annotations

import re
import statistics
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from comparison import (
    MARGIN,
    SWEEPS,
    Comparison,
    Errors,
    fit_counts,
    memory_errors,
    time_errors,
    under_predicted,
)
from corrections import correction_counts

REASONS = Path(__file__).parent / "reasons.toml"
WORST = 25
# Errors of rows with experts above this are explained.
NOTABLE = 0.1
LEAST_IN_SWEEP = 5


def write_document(rows: Sequence[Comparison], seconds: float) -> str:
    """The whole document. `seconds`: what predicting all rows took."""
    good = [c for c in rows if c.prediction.expressible]
    parts = [
        "# Validation",
        "",
        "Written by `make validate TRUTH=FOLDER`; do not edit. Every published end-to-end run that"
        " can be expressed is predicted with all its decisions given, by the evaluator that also"
        " checks every plan. Errors are (predicted - measured) / measured; bias is the median of"
        " the signed errors. Which rows constants were fitted on is said where the constants are:"
        " `autopar/data`.",
        "",
        f"{len(rows)} rows, {len(good)} predicted in {seconds:.0f} s.",
        "",
        *_goals(good),
        *_sources(good),
        *_sweeps(good),
        *_experts(rows),
        *_worst(good),
        *_left_out(rows),
        *_read_again(rows),
    ]
    return "\n".join(parts) + "\n"


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _errors(e: Errors | None) -> list[str]:
    if e is None:
        return ["0", "", "", "", ""]
    numbers = (e.median, e.p90, e.largest)
    return [str(e.count), *(f"{100 * n:.1f}" for n in numbers), f"{100 * e.bias:+.1f}"]


def _table(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *body)] + [""]


def _goals(rows: Sequence[Comparison]) -> list[str]:
    known = [c for c in rows if c.known_recompute]
    unknown = [c for c in rows if not c.known_recompute]
    head = ("", "rows", "median %", "90th %", "max %", "bias %")
    body = [
        ["step time, recomputation known", *_errors(time_errors(known))],
        ["step time, recomputation not stated", *_errors(time_errors(unknown))],
        ["memory, recomputation known", *_errors(memory_errors(known))],
        ["memory, recomputation not stated", *_errors(memory_errors(unknown))],
    ]
    counts = fit_counts(rows)
    ran, right = sum(counts[True, f] for f in (True, False)), counts[True, True]
    oom, caught = sum(counts[False, f] for f in (True, False)), counts[False, False]
    under, measured = under_predicted(rows)
    return [
        "## Summary",
        "",
        "Goals where recomputation is known: time and memory median 6, 90th 15.",
        "",
        *_table(head, body),
        f"- Whether a run fits is predicted right for {right + caught} of {ran + oom} (goal 95 %):"
        f" {right} of {ran} that fitted, {caught} of {oom} out of memory.",
        f"- Measured memory above prediction x {MARGIN:.3f}, which the margin that plans leave free"
        f" would not hold: {under} of {measured} (goal 3 %).",
        "",
    ]


def _sources(rows: Sequence[Comparison]) -> list[str]:
    groups: dict[tuple[str, str], list[Comparison]] = defaultdict(list)
    for c in rows:
        groups[c.group].append(c)
    lines = ["## By source and kind", ""]
    for title, statistic in (("Step time", time_errors), ("Memory", memory_errors)):
        body = []
        for (source, tags), found in sorted(groups.items()):
            errors = statistic(found)
            if errors is not None:
                body.append([f"{source}: {tags}", *_errors(errors)])
        lines += [f"### {title}", ""]
        lines += _table(("", "rows", "median %", "90th %", "max %", "bias %"), body)
    return lines


def _sweeps(rows: Sequence[Comparison]) -> list[str]:
    body = []
    for sweep in SWEEPS:
        groups = sweep.groups(rows, LEAST_IN_SWEEP)
        values = [r for r in map(sweep.correlation, groups) if r == r]
        if values:
            count = sum(map(len, groups))
            body.append(
                [
                    sweep.name,
                    str(len(values)),
                    str(count),
                    f"{statistics.median(values):.3f}",
                    f"{min(values):.3f}",
                ]
            )
    return [
        "## Order within sweeps",
        "",
        "Spearman's rank correlation of predicted and measured GPU seconds per sequence (per work:"
        " per token and parameter, where the models differ), in groups of at least"
        f" {LEAST_IN_SWEEP} rows. Goal 0.9.",
        "",
        *_table(("sweep", "groups", "rows", "median", "least"), body),
    ]


def _experts(rows: Sequence[Comparison]) -> list[str]:
    """Every predicted row of a mixture of experts: there are few, and no two are alike."""
    mixed = [c for c in rows if "moe" in (c.row.get("tags") or "").split()]
    good = [c for c in mixed if c.time_error is not None]
    head = ("", "rows", "median %", "90th %", "max %", "bias %")
    known = [c for c in good if c.known_recompute]
    body = [
        ["step time, recomputation known", *_errors(time_errors(known))],
        ["step time, all", *_errors(time_errors(good))],
    ]
    listed = [
        [
            _name(c),
            c.prediction.recompute,
            f"{c.measured_seconds:.4g}",
            f"{c.prediction.step_seconds:.4g}",
            f"{100 * (c.time_error or 0):+.1f}",
            _reason(c) if abs(c.time_error or 0) > NOTABLE else "",
        ]
        for c in good
    ]
    titles = ("row", "recompute", "measured s", "predicted s", "error %", "reason")
    return [
        "## Mixtures of experts",
        "",
        f"{len(good)} of {len(mixed)} rows are predicted. Nothing was fitted on rows with experts:"
        " exchanges of rows are priced as the all-to-all of the links, grouped products as"
        " products.",
        "",
        *_table(head, body),
        *_table(titles, listed),
    ]


def _worst(rows: Sequence[Comparison]) -> list[str]:
    known = [c for c in rows if c.known_recompute and c.time_error is not None]
    known.sort(key=lambda c: -abs(c.time_error or 0))
    body = [
        [
            _name(c),
            f"{c.measured_seconds:.4g}",
            f"{c.prediction.step_seconds:.4g}",
            f"{100 * (c.time_error or 0):+.0f}",
            _reason(c),
        ]
        for c in known[:WORST]
    ]
    memory = [c for c in rows if c.memory_error is not None]
    memory.sort(key=lambda c: -abs(c.memory_error or 0))
    held = [
        [
            _name(c),
            f"{float(c.row['peak_mem_gib']):.4g}",
            f"{(c.prediction.peak_bytes or 0) / 2**30:.4g}",
            f"{100 * (c.memory_error or 0):+.0f}",
            _reason(c),
        ]
        for c in memory[:WORST]
    ]
    return [
        f"## The {WORST} worst step times where recomputation is known",
        "",
        *_table(("row", "measured s", "predicted s", "error %", "reason"), body),
        f"## The {WORST} worst memories",
        "",
        *_table(("row", "measured GiB", "predicted GiB", "error %", "reason"), held),
    ]


def _name(c: Comparison) -> str:
    row = c.row
    always = ("tp", "pp", "vp", "dp", "zero", "mbs")
    named = [k for k in always if row.get(k)]
    named += [k for k in ("cp", "ep") if row.get(k) not in (None, "", "0", "1")]
    degrees = " ".join(f"{k}{row[k]}" for k in named)
    source = (row.get("source") or "").replace("|", "/")[:40]
    machine = f"{row.get('gpu')} x{row['n_gpus']}"
    return f"{c.index}: {source}, {row.get('model')}, {machine}, s{row['seq']}, {degrees}"


def _reason(c: Comparison) -> str:
    """The first stated reason whose patterns match the row; or what the time is spent on."""
    for reason in tomllib.loads(REASONS.read_text(encoding="utf-8"))["reason"]:
        conditions = reason["when"].items()
        if all(re.search(p, c.row.get(k) or "", re.IGNORECASE) for k, p in conditions):
            return str(reason["text"])
    parts = c.prediction.breakdown or {}
    term = max(parts, key=lambda k: parts[k], default="")
    return f"unexplained; {term.replace('_', ' ')} is the largest term" if term else ""


def _left_out(rows: Sequence[Comparison]) -> list[str]:
    reasons = Counter(
        c.prediction.status.removeprefix("inexpressible: ")
        for c in rows
        if not c.prediction.expressible
    )
    body = [[reason.replace("|", "/"), str(count)] for reason, count in reasons.most_common()]
    return ["## Rows that can't be expressed", "", *_table(("reason", "rows"), body)]


def _read_again(rows: Sequence[Comparison]) -> list[str]:
    counts = correction_counts([c.row for c in rows])
    if not counts:
        return []
    body = [[why, str(count)] for why, count in counts]
    return [
        "## Rows completed from their sources",
        "",
        "What the sources say and the table lacks, read again (`corrections.toml`); or which rows"
        " they say not to compare with each other.",
        "",
        *_table(("source", "rows"), body),
    ]
