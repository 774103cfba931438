"""`autopar plan`: search, print, save, draw."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from autopar.api import compute_dtype, rewrite_for, search_plan
from autopar.cluster import Cluster
from autopar.errors import UsageError
from autopar.experts.history import Recorded
from autopar.experts.load import of_file
from autopar.models import ModelSource, resolve_model
from autopar.plan_check import check_plan
from autopar.search.infeasible import infeasible_error
from autopar.search.progress import Progress
from autopar.workflow.outcome import Outcome
from autopar.workflow.pictures import block_pictures


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked for, as given."""

    model: str
    cluster: str
    global_batch: int
    sequence: int | None
    memory_limit: str | None
    pins: str
    precision: str | None
    optimizer: str
    time_limit: float | None
    execution: str | None = None
    expert_load: Path | None = None
    spare_experts: int = 0


def find_plan(request: PlanRequest, *, quiet: bool) -> tuple[Outcome, Cluster]:
    """Resolve the model and search."""
    cluster = Cluster.parse(request.cluster)
    if request.execution is not None:
        cluster = cluster.with_execution(request.execution)
    pins, precision = take_precision(request.pins, request.precision)
    precision = precision or default_precision(request.model, cluster)
    if not quiet:
        _status("capture and analyses")
    source = resolved(request, precision)
    outcome = search_plan(
        source.model,
        cluster,
        example_inputs=source.example_inputs,
        loss_fn=source.loss_fn,
        global_batch_size=request.global_batch,
        memory_limit=request.memory_limit,
        pins=pins,
        precision=precision,
        optimizer=request.optimizer,
        spare_experts=request.spare_experts,
        sequence=request.sequence,
        time_limit=request.time_limit,
        name=source.name,
        progress=None if quiet else _show_progress,
    )
    return outcome, cluster


def resolved(request: PlanRequest, precision: str | None) -> ModelSource:
    """The model that was asked for; raises `UsageError` for an unknown precision."""
    dtype = compute_dtype(precision or "fp32")
    found = resolve_model(request.model, sequence=request.sequence, dtype=dtype)
    if request.expert_load is not None:
        from autopar.experts.expected import expect_load

        recorded = Recorded.read(request.expert_load)
        with of_file(request.expert_load):
            expect_load(found.model, recorded.load)
    return found


def take_precision(pins: str, precision: str | None) -> tuple[str, str | None]:
    """`precision=` may be given among the pins too."""
    kept = []
    for part in pins.split(","):
        name, _, value = part.partition("=")
        if name.strip() == "precision":
            if precision not in (None, value.strip()):
                raise UsageError(
                    f"precision is given twice: {precision} and {value}",
                    next_step="keep one of them",
                )
            precision = value.strip()
        else:
            kept.append(part)
    return ",".join(kept), precision


def default_precision(model: str, cluster: Cluster) -> str | None:
    """Mixed on GPUs, float32 on CPUs; a user's own function decides by its parameters."""
    if not model.startswith(("zoo:", "hf:")):
        return None
    return "fp32" if cluster.device.name == "cpu" else "bf16-mixed"


def _show_progress(state: Progress) -> None:
    best = f"{state.best_seconds:.4g} s" if state.best_seconds else "none yet"
    _status(
        f"search: {state.explored} explored, {state.pruned} pruned, {state.waiting} waiting, "
        f"best {best}, bound {state.bound_seconds:.4g} s"
    )
    if state.interrupted:
        _status("interrupted: the best plan so far is completed; once more to leave without it")


def _status(text: str) -> None:
    """The line that says what is done, on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text} ", end="", file=sys.stderr, flush=True)


def plan_command(
    request: PlanRequest, out: Path | None, report: Path | None, *, as_json: bool
) -> int:
    """Print a plan; returns the exit code (5 when nothing fits)."""
    outcome, cluster = find_plan(request, quiet=as_json)
    if sys.stderr.isatty() and not as_json:
        print(file=sys.stderr)
    if as_json:
        print(json.dumps(outcome.to_json(), indent=2))
    if outcome.plan is None:
        if as_json:
            return infeasible_error(outcome.result).exit_code
        raise infeasible_error(outcome.result)
    if out is not None:
        _save(outcome, out)
    if report is not None:
        write_page(outcome, cluster, report)
    if not as_json:
        _print(outcome, out, report)
    return 0


def _save(outcome: Outcome, out: Path) -> None:
    assert outcome.plan is not None
    try:
        outcome.plan.save(out)
    except OSError as error:
        raise UsageError(
            f"can't write the plan {out}: {error.strerror}",
            next_step="name a file in a writable folder",
        ) from error


def write_page(outcome: Outcome, cluster: Cluster, path: Path) -> None:
    """The HTML report of an outcome with a plan."""
    from autopar.report.page import write_report

    assert outcome.plan is not None
    check_plan(outcome.plan, outcome.program)
    parts = rewrite_for(outcome.program, outcome.plan)
    write_report(outcome.plan, block_pictures(parts, cluster), None, path)


def _print(outcome: Outcome, out: Path | None, report: Path | None) -> None:
    from rich.console import Console

    from autopar.report.text import show

    assert outcome.plan is not None
    console = Console()
    console.print(show(outcome.plan))
    for label, path in (("plan", out), ("report", report)):
        if path is not None:
            console.print(f"{label} written to {path}", markup=False, highlight=False)
