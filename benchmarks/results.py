"""RESULTS.md holds one section per benchmark; each benchmark replaces its own."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).resolve().parent / "RESULTS.md"
TITLE = "# Benchmarks\n"


def write_section(title: str, lines: Iterable[str], path: Path = RESULTS) -> None:
    """Put a section under its title, in place of the one of the same title if there is one."""
    text = path.read_text() if path.exists() else TITLE
    sections = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", text, flags=re.MULTILINE))
    sections[title] = "\n" + "\n".join(lines).strip("\n") + "\n\n"
    body = "".join(f"\n## {name}\n{content.rstrip()}\n" for name, content in sections.items())
    path.write_text(TITLE + body)
    print(f"wrote {path.name}: {title}")


def machine() -> str:
    """What a measurement depends on, in one sentence."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "ortools", "transformers"))
    return (
        f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, "
        f"{versions}."
    )
