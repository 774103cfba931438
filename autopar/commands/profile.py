"""`autopar profile`: measure the machine and write the cluster TOML that every command accepts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from autopar.errors import UsageError
from autopar.mesh import AXES, Mesh
from autopar.workflow.profiling import Profile, profile


def profile_command(
    out: Path | None, nproc: int, mesh: str | None, seconds: float, *, quick: bool
) -> int:
    """Measure on the ranks of torchrun, or on `nproc` local ones; returns the exit code."""
    if seconds <= 0 or nproc < 1:
        raise UsageError(f"--seconds {seconds:g} --nproc {nproc}", next_step="give numbers above 0")
    degrees = parse_mesh(mesh) if mesh else None
    # Before minutes of measuring.
    if degrees is not None and "WORLD_SIZE" not in os.environ and degrees.size != nproc:
        raise UsageError(
            f"--mesh {mesh} has {degrees.size} ranks, --nproc is {nproc}",
            next_step="give degrees whose product is the number of ranks",
        )
    if out is not None and not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        raise UsageError(
            f"can't write {out}: no writable folder {out.parent}",
            next_step="name a file in a writable folder",
        )
    if "WORLD_SIZE" in os.environ or nproc == 1:
        text = measure(seconds, quick, degrees)
    else:
        from autopar.runtime.launch import spawn

        limit = 3 * seconds + 120
        text = spawn(measure, nproc, (seconds, quick, degrees), timeout_seconds=limit)[0]
    if text is not None:
        if out is None:
            print(text, end="")
        else:
            out.write_text(text, encoding="utf-8")
            print(f"wrote {out}: use it as --cluster {out}")
    return 0


def parse_mesh(text: str) -> Mesh:
    """`pp=2,dp=2,tp=4`; axes left out have one rank."""
    degrees: dict[str, Any] = {}
    for part in text.split(","):
        axis, _, degree = part.strip().partition("=")
        if axis not in AXES or not degree.isdigit() or int(degree) < 1:
            raise UsageError(
                f"--mesh {text!r}: {part!r}", next_step=f"write degrees of {', '.join(AXES)}"
            )
        degrees[axis] = int(degree)
    return Mesh(**degrees)


def measure(seconds: float, quick: bool, mesh: Mesh | None) -> str | None:
    """The TOML on rank 0, which also shows what it does; None on the others."""
    first = os.environ.get("RANK", "0") == "0"
    console = Console(file=sys.stderr)
    columns = (TextColumn("{task.description:<28}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not first) as progress:
        task = progress.add_task("starting", total=1.0)

        def report(what: str, done: float) -> None:
            progress.update(task, description=what, completed=done)

        found = profile(seconds=seconds, quick=quick, mesh=mesh, report=report)
    if not first:
        return None
    console.print(summary(found))
    return found.cluster.to_toml()


def summary(found: Profile) -> Table:
    """The largest sample of each kind, and for links what the fitted figures predict."""
    table = Table(title=f"measured in {found.seconds:.0f} s")
    for name in ("what", "size", "seconds", "rate", "predicted"):
        table.add_column(name, justify="left" if name == "what" else "right")
    for key in dict.fromkeys((s.what, s.dtype) for s in found.samples if s.work):
        best = max((s for s in found.samples if (s.what, s.dtype) == key), key=lambda s: s.rate)
        unit = "GB/s" if best.what == "memory" else "GFLOP/s"
        size = "x".join(str(n) for n in best.shape)
        rate = f"{best.rate / 1e9:,.1f} {unit}"
        table.add_row(f"{best.what} {best.dtype}", size, f"{best.seconds:.2e}", rate, "")
    errors = found.link_errors()
    for group in dict.fromkeys((s.kind, s.group, s.stride) for s, _ in errors):
        sample, predicted = max(
            ((s, p) for s, p in errors if (s.kind, s.group, s.stride) == group),
            key=lambda pair: pair[0].nbytes,
        )
        table.add_row(
            f"{sample.kind} of {sample.group}, stride {sample.stride}",
            f"{sample.nbytes:,} B",
            f"{sample.seconds:.2e}",
            f"{sample.nbytes / sample.seconds / 1e9:,.2f} GB/s",
            f"{predicted:.2e} s",
        )
    return table
