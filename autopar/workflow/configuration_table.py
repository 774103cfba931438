"""A table of configurations in, the same rows with predictions out, in the same order.

Rows of one architecture share one captured model and its block prices, and architectures are spread
over processes.
"""

from __future__ import annotations

import csv
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import AutoparError, UsageError
from autopar.workflow.configuration_row import BEYOND, RowConfiguration, read_row
from autopar.workflow.reported_practice import InexpressibleError

if TYPE_CHECKING:
    from autopar.workflow.evaluator import Evaluator

GIB = 2**30
PREDICTED = ("predicted_status", "predicted_step_seconds", "predicted_peak_gib")
EXAMPLE_SEQUENCE = 2048
# Characters of a reason in a table.
LONGEST_REASON = 400


@dataclass(frozen=True)
class RowPrediction:
    """What a row costs; `status` is `fits`, `oom` or `inexpressible: why`. An error of ours is such
    a reason too, with its type: it costs its own row alone.

    Bytes are those of the fullest rank. `peak_bytes`: counted the way the row's `mem_kind` says,
    reserved by the allocator where it says nothing. `recompute`: as stated, or assumed.
    """

    status: str
    step_seconds: float | None = None
    peak_bytes: int | None = None
    device_bytes: int | None = None
    breakdown: dict[str, float] | None = None
    recompute: str = ""

    @property
    def expressible(self) -> bool:
        return self.step_seconds is not None


def peak_kind(mem_kind: str) -> str:
    """Which of a footprint's numbers a row's memory column holds."""
    text = mem_kind.lower()
    if "smi" in text:
        return "device"
    if "allocated" in text and "reserved" not in text:
        stage = "last" if "last" in text else "first" if "rank-0" in text else ""
        return f"allocated {stage}".strip()
    return "reserved"


def predict_rows(
    rows: Sequence[dict[str, str]],
    *,
    workers: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[RowPrediction]:
    """Predictions in the order of `rows`. `progress` is told how many rows are done, of all. Raises
    for no row: those that can't be predicted say why."""
    found: list[RowPrediction | None] = [None] * len(rows)
    groups: dict[object, list[tuple[int, RowConfiguration]]] = {}
    for i, row in enumerate(rows):
        try:
            read = read_row(row)
        except Exception as error:
            found[i] = _without(error)
            continue
        groups.setdefault(read.model, []).append((i, read))
    done = sum(f is not None for f in found)
    kinds = [peak_kind(row.get("mem_kind") or "") for row in rows]
    jobs = [[(i, read, kinds[i]) for i, read in group] for group in groups.values()]
    for part in _run(sorted(jobs, key=len, reverse=True), workers):
        for i, prediction in part:
            found[i] = prediction
        done += len(part)
        if progress:
            progress(done, len(rows))
    assert all(f is not None for f in found)
    return [f for f in found if f is not None]


Job = list[tuple[int, RowConfiguration, str]]
Part = list[tuple[int, RowPrediction]]


def _run(jobs: Sequence[Job], workers: int) -> Iterable[Part]:
    if workers < 2 or len(jobs) < 2:
        yield from map(_predict_group, jobs)
        return
    # Spawned, not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_one_thread) as pool:
        futures = {pool.submit(_predict_group, job): job for job in jobs}
        lost = []
        for future in as_completed(futures):
            try:
                yield future.result()
            except BrokenProcessPool:
                lost.append(futures[future])
    # A process that is killed ends all that its pool has not done yet: each by itself once more.
    for job in lost:
        with ProcessPoolExecutor(1, context, initializer=_one_thread) as pool:
            try:
                yield pool.submit(_predict_group, job).result()
            except BrokenProcessPool as error:
                yield _none_of(job, error)


def _none_of(job: Job, error: Exception) -> Part:
    return [(i, _without(error)) for i, *_ in job]


def _without(error: Exception) -> RowPrediction:
    """What is said of a row instead of numbers."""
    text = error.message if isinstance(error, AutoparError) else str(error)
    if not isinstance(error, AutoparError | InexpressibleError):
        text = f"{type(error).__name__}: {text}"
    return RowPrediction(f"inexpressible: {' '.join(text.split())[:LONGEST_REASON]}")


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _predict_group(job: Job) -> Part:
    """All rows of one architecture, in one process."""
    part: Part = []
    for single in (True, False):
        rows = [row for row in job if (row[1].configuration.precision == "fp32") == single]
        if rows:
            part += _predict_alike(rows, single)
    return part


def _predict_alike(job: Job, single: bool) -> Part:
    """`single`: products in float32, which are priced at another rate."""
    import torch

    from autopar.passes.capture import capture
    from autopar.workflow.evaluator import Evaluator
    from autopar.workflow.prepare import prepare
    from autopar.workflow.row_model import build

    # The captured dtype is that of compute.
    dtype = torch.float32 if single else torch.bfloat16
    try:
        model, inputs = build(job[0][1].model, EXAMPLE_SEQUENCE, dtype)
        program = capture(model, inputs, name="row", dtype=dtype)
        evaluator = Evaluator(prepare(program, dict(program.sizes)))
    except Exception as error:
        return _none_of(job, error)
    return [(i, _predict(evaluator, read, kind)) for i, read, kind in job]


def _predict(evaluator: Evaluator, read: RowConfiguration, kind: str) -> RowPrediction:
    try:
        seen = evaluator.predict(read.configuration, read.layers)
        for policy in ("core", "full"):
            # A row that does not say what it recomputes is taken to recompute as little as fits.
            if "recompute" not in read.assumed or seen.fits:
                break
            seen = evaluator.predict(replace(read.configuration, recompute=policy), read.layers)
    except Exception as error:
        return _without(error)
    return RowPrediction(
        "fits" if seen.fits else "oom",
        seen.step_seconds,
        seen.footprint.reported(kind),
        seen.footprint.device_bytes,
        dict(seen.evaluation.time_breakdown),
        seen.configuration.recompute,
    )


def predict_table(
    source: Path,
    out: Path,
    *,
    workers: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[RowPrediction]:
    """Read `source`, write `out`: the same columns and rows with `PREDICTED` appended.

    Raises `UsageError` for a file that can't be read or written, or has no `layers` column.
    """
    columns, rows = read_table(source)
    predictions = predict_rows(rows, workers=workers, progress=progress)
    kept = [c for c in columns if c not in PREDICTED]
    try:
        with out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*kept, *PREDICTED], extrasaction="ignore")
            writer.writeheader()
            for row, p in zip(rows, predictions, strict=True):
                writer.writerow({**row, **_cells(p)})
    except OSError as error:
        raise UsageError(
            f"can't write {out}: {error.strerror}", next_step="name a file in a writable folder"
        ) from error
    return predictions


def read_table(source: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Columns and rows of a CSV file; cells that a short row lacks are empty, those that a long one
    has too many are in the column `BEYOND`."""
    try:
        with source.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            rows = [
                {k or BEYOND: v if k else ",".join(v) for k, v in row.items()} for row in reader
            ]
            columns = list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"can't read {source}: {error}", next_step="give a CSV file") from error
    missing = {"layers", "hidden", "gpu", "n_gpus"} - set(columns)
    if missing:
        raise UsageError(
            f"{source} has no column {', '.join(sorted(missing))}",
            next_step="name the columns as `autopar evaluate --help` lists them",
        )
    return columns, rows


def _cells(prediction: RowPrediction) -> dict[str, str]:
    if prediction.step_seconds is None or prediction.peak_bytes is None:
        return dict(zip(PREDICTED, (prediction.status, "", ""), strict=True))
    return {
        "predicted_status": prediction.status,
        "predicted_step_seconds": f"{prediction.step_seconds:.6g}",
        "predicted_peak_gib": f"{prediction.peak_bytes / GIB:.4g}",
    }
