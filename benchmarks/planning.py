"""How long planning takes and how much memory it needs, for models of 8 to 405 billion parameters.

Each case runs `autopar plan --json` in a process of its own, so that its peak memory is its own.
Writes its section of benchmarks/RESULTS.md; exit code 1 if a case fails or misses its target.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import machine, write_section

ROOT = Path(__file__).resolve().parent.parent
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Case:
    """One planning problem and what it may cost (whole process, import to exit)."""

    model: str
    cluster: str
    target_seconds: float
    target_bytes: float
    sequence: int = 8192
    global_batch: int = 512

    @property
    def arguments(self) -> list[str]:
        return [
            "plan", f"zoo:{self.model}", "--cluster", self.cluster,
            "--global-batch", str(self.global_batch), "--seq", str(self.sequence), "--json",
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """What one case cost, and the document that `--json` printed."""

    case: Case
    seconds: float
    cpu_seconds: float
    peak_bytes: int
    answer: dict[str, Any]

    @property
    def on_target(self) -> bool:
        return (
            self.answer.get("status") == "optimal"
            and self.seconds <= self.case.target_seconds
            and self.peak_bytes <= self.case.target_bytes
        )


CASES = (
    Case("llama3-8b", "h100:8x8", target_seconds=60, target_bytes=4 * GIB),
    Case("llama3-70b", "h100:8x8", target_seconds=120, target_bytes=8 * GIB),
    Case("llama3-405b", "h100:128x8", target_seconds=120, target_bytes=8 * GIB),
    Case("llama3-405b", "h100:2048x8", 75, 4 * GIB, global_batch=16384),
    Case("gpt3-175b", "a100-80:128x8", 60, 4 * GIB, sequence=2048, global_batch=1536),
)
# Source: its own run on a 2-core machine of the kind that made this table.
PEER = (
    "To compare: PyTorch AutoParallel takes 230 to 415 s and 4.4 GB for the first line, measured\n"
    "on the same kind of 2-core machine, for a smaller search space: no pipeline, no choice of\n"
    "ZeRO level or recomputation."
)


def measure(case: Case, timeout_seconds: float) -> Measured:
    """Run one case to its end; raises `RuntimeError` with its message if it fails."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "autopar", *case.arguments], cwd=ROOT, stdout=out, stderr=err
        )
        # wait4 reports the peak of this very process; RUSAGE_CHILDREN would be the worst so far.
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() - start > timeout_seconds:
                process.kill()
            time.sleep(0.02)
        seconds = time.monotonic() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise RuntimeError(f"exit code {process.returncode}: {err.read().decode()[-2000:]}")
        peak = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        cpu = usage.ru_utime + usage.ru_stime
        return Measured(case, seconds, cpu, peak, json.loads(out.read()))


def plan_text(answer: dict[str, Any]) -> str:
    degrees = {axis: n for axis, n in answer["mesh"].items() if axis != "order" and n > 1}
    mesh = " ".join(f"{axis}{n}" for axis, n in degrees.items())
    if order := answer["mesh"].get("order"):
        mesh += f" (ranks {order})"
    micro = answer["microbatch"]
    return (
        f"{mesh}, ZeRO {answer['zero']}, recompute {answer['recompute']}, "
        f"{micro['count']}×{micro['size']}, {answer['schedule']}"
    )


def row(result: Measured) -> str:
    answer, search = result.answer, result.answer["search"]
    parts = "/".join(f"{search['seconds'][k]:.1f}" for k in ("capture", "analyse", "search"))
    case = result.case
    cells = [
        f"{case.model}, {case.sequence}",
        f"{case.cluster}, {case.global_batch:,}",
        f"{result.seconds:.1f} s ({parts})",
        f"{result.cpu_seconds:.1f} s",
        f"{result.peak_bytes / GIB:.2f} GiB",
        f"{case.target_seconds:.0f} s, {case.target_bytes / GIB:.0f} GiB",
        f"{answer['status']}, gap {search['gap']:.2%}",
        plan_text(answer),
        f"{answer['step_seconds']:.2f} s, MFU {answer['mfu']:.1%}",
    ]
    return "| " + " | ".join(cells) + " |"


def lines(results: list[Measured]) -> list[str]:
    """The section of RESULTS.md."""
    titles = (
        "model, sequence", "cluster, global batch", "wall (capture/analyse/search)", "CPU",
        "peak memory", "target", "proof", "plan", "predicted step",
    )  # fmt: skip
    return [
        "Made by `benchmarks/planning.py`. Wall and CPU time of the whole `autopar plan` process,",
        "imports included; in brackets what the planner reports for its three parts. Memory is the",
        "peak resident size of that process.",
        "",
        machine(),
        "",
        "| " + " | ".join(titles) + " |",
        "|" + " --- |" * len(titles),
        *map(row, results),
        "",
        PEER,
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one case")
    timeout = parser.parse_args().timeout
    results, failed = [], False
    for case in CASES:
        print(f"{case.model} on {case.cluster} ...", flush=True)
        try:
            result = measure(case, timeout)
        except RuntimeError as error:
            print(f"  failed: {error}")
            failed = True
            continue
        results.append(result)
        failed |= not result.on_target
        verdict = "on target" if result.on_target else "TARGET MISSED"
        print(f"  {result.seconds:.1f} s, {result.peak_bytes / GIB:.2f} GiB: {verdict}")
        print(f"  {plan_text(result.answer)}")
    if results:
        write_section("Planning", lines(results))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
