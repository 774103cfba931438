"""`autopar run`: a script on local ranks."""

from __future__ import annotations

from pathlib import Path

from autopar.errors import UsageError


def run_command(script: Path, nproc: int, args: list[str]) -> int:
    """Start `nproc` ranks under torchrun; returns torchrun's exit code."""
    from autopar.runtime.launch import run_script

    if not script.is_file():
        raise UsageError(f"no script {script}", next_step="give the path of a Python file")
    if nproc < 1:
        raise UsageError(f"--nproc {nproc}", next_step="start at least one rank")
    return run_script(nproc, str(script), args)
