"""Open a page in headless Chromium, without a network, and see what its scripts made of it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--enable-logging=stderr", "--v=0",
)  # fmt: skip


def open_page(page: Path, folder: Path, *flags: str, timeout: float = 120) -> tuple[str, str]:
    """(DOM after the scripts ran, console messages); skips the test where there is no Chromium."""
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    if binary is None:
        pytest.skip(f"no browser to open the page: none of {', '.join(NAMES)} is installed")
    done = subprocess.run(
        [binary, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000",
         "--window-size=1600,1000", "--dump-dom", *flags, page.as_uri()],
        capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return done.stdout, "\n".join(console)
