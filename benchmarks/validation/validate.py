"""Hold the cost model against published measurements; writes docs/validation.md.

    python benchmarks/validation/validate.py FOLDER_OF_TRUTH [--out docs/validation.md]

The folder holds `core_validation.csv`: one row per published run, columns as `autopar evaluate
--table` reads them, with `step_time_norm_s`, `peak_mem_gib`, `mem_kind`, `oom`, `source`, `tags`.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import time
from pathlib import Path

from comparison import Comparison
from corrections import corrected
from document import write_document

from autopar.workflow.configuration_table import GIB, predict_rows, read_table

ROOT = Path(__file__).resolve().parents[2]


def compare(table: Path, workers: int, source: str = "") -> list[Comparison]:
    """Every row of `table` (whose source holds the words of `source`) with its prediction."""
    _, rows = read_table(table)
    rows = [corrected(r) for r in rows if source in (r.get("source") or "")]

    def show(done: int, total: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done}/{total} rows ", end="", file=sys.stderr, flush=True)

    predictions = predict_rows(rows, workers=workers, progress=show)
    return [Comparison(i, r, p) for i, (r, p) in enumerate(zip(rows, predictions, strict=True))]


def write_rows(found: list[Comparison], path: Path) -> None:
    """Measured and predicted values of every row."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["row", "status", "seconds", "measured", "gib", "measured_gib"])
        for c in found:
            peak, held = c.prediction.peak_bytes, c.measured_bytes
            writer.writerow(
                [
                    *(c.index, c.prediction.status),
                    *(c.prediction.step_seconds, c.measured_seconds),
                    *(peak and peak / GIB, held and held / GIB),
                ]
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("truth", type=Path, help="folder with core_validation.csv")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "validation.md")
    parser.add_argument("--rows", type=Path, help="also write one line per row here, as CSV")
    parser.add_argument("--source", default="", help="only rows whose source holds these words")
    parser.add_argument("--workers", type=int, default=max(1, min(8, os.cpu_count() or 1)))
    arguments = parser.parse_args()
    start = time.perf_counter()
    found = compare(arguments.truth / "core_validation.csv", arguments.workers, arguments.source)
    seconds = time.perf_counter() - start
    arguments.out.parent.mkdir(exist_ok=True)
    arguments.out.write_text(write_document(found, seconds), encoding="utf-8")
    if arguments.rows:
        write_rows(found, arguments.rows)
    expressed = sum(c.prediction.expressible for c in found)
    print(f"{len(found)} rows, {expressed} predicted in {seconds:.0f} s: {arguments.out}")


if __name__ == "__main__":
    main()
