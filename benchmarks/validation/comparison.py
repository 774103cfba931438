"""Predicted against published: one comparison per row, and the statistics of many."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from autopar.cost.memory import DEFAULT_MARGIN
from autopar.workflow.configuration_table import GIB, RowPrediction

Row = dict[str, str]
# Memory above prediction times this counts as under-predicted: plans leave a margin of the device's
# memory free, so what is predicted may turn out so much larger and still fit.
MARGIN = 1 / (1 - DEFAULT_MARGIN)


@dataclass(frozen=True)
class Comparison:
    """`index`: of the row in its table. Errors are relative to the measurement; None where either
    side is missing."""

    index: int
    row: Row
    prediction: RowPrediction

    @property
    def measured_seconds(self) -> float | None:
        text = self.row.get("step_time_norm_s") or self.row.get("step_time_s") or ""
        return float(text) if text else None

    @property
    def measured_bytes(self) -> float | None:
        text = self.row.get("peak_mem_gib") or ""
        return float(text) * GIB if text else None

    @property
    def time_error(self) -> float | None:
        seconds, measured = self.prediction.step_seconds, self.measured_seconds
        return seconds / measured - 1 if seconds is not None and measured else None

    @property
    def memory_error(self) -> float | None:
        peak, measured = self.prediction.peak_bytes, self.measured_bytes
        return peak / measured - 1 if peak is not None and measured else None

    @property
    def ran(self) -> bool | None:
        """Whether the published run fitted; None when nothing is known."""
        if self.row.get("oom") == "1":
            return False
        known = self.measured_seconds or self.measured_bytes or self.row.get("oom") == "0"
        return True if known else None

    @property
    def known_recompute(self) -> bool:
        return "rc_unknown" not in (self.row.get("tags") or "")

    @property
    def group(self) -> tuple[str, str]:
        """Source and the tags that matter for the model."""
        wanted = {"moe", "tp", "pp", "cp", "ep", "fsdp"}
        wanted |= {"rc_none", "rc_sel", "rc_full", "rc_unknown"}
        tags = [t for t in (self.row.get("tags") or "").split() if t in wanted]
        # Releases of one benchmark suite are one source.
        source = re.sub(r"\s+\d\d\.\d\d(\.\d\d)?\b.*", "", self.row.get("source") or "")
        return source, " ".join(tags)


@dataclass(frozen=True)
class Errors:
    """Statistics of signed relative errors."""

    count: int
    median: float
    p90: float
    largest: float
    bias: float

    @staticmethod
    def of(values: Sequence[float]) -> Errors | None:
        if not values:
            return None
        size = sorted(abs(v) for v in values)
        return Errors(
            len(values),
            statistics.median(size),
            size[min(len(size) - 1, int(0.9 * len(size)))],
            size[-1],
            statistics.median(values),
        )


def time_errors(rows: Iterable[Comparison]) -> Errors | None:
    return Errors.of([c.time_error for c in rows if c.time_error is not None])


def memory_errors(rows: Iterable[Comparison]) -> Errors | None:
    return Errors.of([c.memory_error for c in rows if c.memory_error is not None])


def under_predicted(rows: Iterable[Comparison]) -> tuple[int, int]:
    """How many measured memories exceed prediction and margin, and how many were measured."""
    found = [c for c in rows if c.memory_error is not None]
    return sum((1 + (c.memory_error or 0)) * MARGIN < 1 for c in found), len(found)


def fit_counts(rows: Iterable[Comparison]) -> dict[tuple[bool, bool], int]:
    """(it ran, it is predicted to fit) -> rows, where both are known."""
    counts = {(a, b): 0 for a in (True, False) for b in (True, False)}
    for c in rows:
        if c.ran is not None and c.prediction.expressible:
            counts[c.ran, c.prediction.status == "fits"] += 1
    return counts


def spearman(one: Sequence[float], two: Sequence[float]) -> float:
    """Rank correlation; ties share their mean rank. NaN when one side is constant."""
    a, b = _ranks(one), _ranks(two)
    mean_a, mean_b = statistics.fmean(a), statistics.fmean(b)
    top = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    bottom = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    return top / bottom**0.5 if bottom else float("nan")


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=lambda i: values[i])
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for i in order[start:stop]:
            ranks[i] = (start + stop - 1) / 2
        start = stop
    return ranks


@dataclass(frozen=True)
class Sweep:
    """Rows that a planner would have to put in order: one source, everything in `same` equal."""

    name: str
    source: str
    same: tuple[str, ...]
    value: Callable[[Comparison, float], float]

    def groups(self, rows: Iterable[Comparison], least: int) -> list[list[Comparison]]:
        found: dict[tuple[str, ...], list[Comparison]] = {}
        for c in rows:
            if self.source in (c.row.get("source") or "") and c.time_error is not None:
                found.setdefault(tuple(c.row.get(k) or "" for k in self.same), []).append(c)
        return [g for g in found.values() if len(g) >= least]

    def correlation(self, group: Sequence[Comparison]) -> float:
        predicted = [self.value(c, c.prediction.step_seconds or 0.0) for c in group]
        measured = [self.value(c, c.measured_seconds or 0.0) for c in group]
        return spearman(predicted, measured)


def seconds_per_sample(c: Comparison, seconds: float) -> float:
    """GPU seconds per sequence."""
    return seconds * float(c.row["n_gpus"]) / float(c.row["gbs"])


def seconds_per_work(c: Comparison, seconds: float) -> float:
    """GPU seconds per token and parameter: models of a sweep differ a little in size."""
    row = c.row
    size = float(row["layers"]) * float(row["hidden"]) ** 2 + float(row["hidden"]) * float(
        row["vocab"]
    )
    tokens = float(row["gbs"]) * float(row["seq"])
    return seconds * float(row["n_gpus"]) / (tokens * size)


SWEEPS = (
    Sweep("BLOOM topologies, all", "BLOOM", ("n_gpus",), seconds_per_work),
    Sweep(
        "BLOOM topologies, comparable days",
        "BLOOM",
        ("n_gpus", "period"),
        seconds_per_work,
    ),
    Sweep("BLOOM, one model", "BLOOM", ("n_gpus", "layers", "hidden"), seconds_per_sample),
    Sweep(
        "BLOOM, one model, comparable days",
        "BLOOM",
        ("n_gpus", "layers", "hidden", "period"),
        seconds_per_sample,
    ),
    Sweep("vTrain, one model", "vTrain", ("seq", "layers", "hidden"), seconds_per_sample),
    Sweep(
        "vTrain, one model, GPUs and batch",
        "vTrain",
        ("seq", "layers", "hidden", "n_gpus", "gbs"),
        seconds_per_sample,
    ),
    Sweep("Mosaic, one GPU type", "Mosaic", ("gpu", "gpu_mem_gb"), seconds_per_sample),
    Sweep("Mosaic, one GPU type, per work", "Mosaic", ("gpu", "gpu_mem_gb"), seconds_per_work),
)
