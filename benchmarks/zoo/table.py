"""docs/zoo.md: one line for each architecture."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.zoo.verify import PLANS, Row

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "zoo.md"
INTRODUCTION = """# The zoo

Written by `make zoo`; do not edit. Each architecture is a toy built with the unmodified code of
transformers, diffusers, peft or torch (`benchmarks/zoo`), dropout off. **capture**: the captured
graph gives the loss and all gradients of the model in eager mode, to a relative error of 1e-5.
**TP**, **PP**, **ZeRO**: a plan for two ranks with tensor parallelism 2, two pipeline stages, or
ZeRO-3 over two data-parallel ranks ran on two gloo processes; its loss, every gradient and every
buffer that a step changes equal those of one device, to the same error. TP says how many of the
weights of the distinct blocks a rank holds a slice of. **s**: seconds for all of a line, on two
shared cores; **ms**: of one step under TP, PP and ZeRO. **replicated**: ops that have no sharding
rule, which every rank of a TP plan runs whole.
"""


def write_table(rows: Sequence[Row], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(table(rows))


def table(rows: Sequence[Row]) -> str:
    """The page: a count, then a table for each family in the order of the rows."""
    good = sum(not r.failed and r.capture == "equal" for r in rows)
    lines = [INTRODUCTION, f"{good} of {len(rows)} architectures run.", ""]
    for family in dict.fromkeys(r.family for r in rows):
        lines += [f"## {family}", ""]
        lines.append(f"| architecture | capture | {' | '.join(PLANS)} | s | ms | replicated |")
        lines.append("| --- | --- | " + "--- | " * len(PLANS) + "---: | --- | --- |")
        lines += [_line(r) for r in rows if r.family == family]
        lines.append("")
    return "\n".join(lines)


def _line(row: Row) -> str:
    cells = [row.name, row.capture, *(row.cells.get(c, "") for c in PLANS)]
    steps = " / ".join(
        f"{1e3 * row.step_seconds[c]:.0f}" if c in row.step_seconds else "-" for c in PLANS
    )
    cells += [f"{row.seconds:.0f}", steps, ", ".join(row.replicated)]
    return "| " + " | ".join(_escaped(c) for c in cells) + " |"


def _escaped(text: str) -> str:
    """Without folders of this machine."""
    text = re.sub(r'"?/\S*?/(?:site-packages|' + re.escape(ROOT.name) + r")/", "", text)
    return " ".join(text.split()).replace("|", "\\|")
