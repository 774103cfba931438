"""The quickstart as a user starts it: a script on two real ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_quickstart_trains_on_two_ranks() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autopar", "run", "--nproc", "2", "examples/quickstart.py"],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    # Random bytes cost ln 256 = 5.55; one printed line per report: only the first rank speaks.
    assert len(losses) == 5
    assert 5.0 < losses[0] < 6.5 and losses[-1] < 4.0
    assert re.search(r"^pp\d+ dp\d+ tp\d+, ", done.stdout, flags=re.MULTILINE)
