"""Run the zoo and write docs/zoo.md: `python -m benchmarks.zoo [NAME ...]`.

With names only these run, and a table is written only where `--out` says. `--rows` keeps finished
rows in a file and does not run them again: for a run that was cut short. Exit code 1 if one is
wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.zoo.all_architectures import ARCHITECTURES
from benchmarks.zoo.table import TABLE, write_table
from benchmarks.zoo.verify import Row, verify_architecture


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[*ARCHITECTURES, []])
    parser.add_argument("--rows", type=Path, help="finished rows, JSON")
    parser.add_argument("--out", type=Path, help="the table (default without names: docs/zoo.md)")
    options = parser.parse_args(arguments)
    out = options.out or (None if options.names else TABLE)
    quiet()
    rows = _read(options.rows)
    for name in options.names or list(ARCHITECTURES):
        if name in rows:
            continue
        rows[name] = verify_architecture(ARCHITECTURES[name])
        print_row(rows[name])
        if options.rows is not None:
            options.rows.write_text(json.dumps([asdict(r) for r in rows.values()], indent=1))
    if out is not None:
        write_table([rows[n] for n in ARCHITECTURES if n in rows], out)
    failed = [r.name for r in rows.values() if r.failed]
    print(f"{len(rows) - len(failed)} of {len(rows)} right" + (f"; wrong: {failed}" * bool(failed)))
    return 1 if failed else 0


def _read(path: Path | None) -> dict[str, Row]:
    if path is None or not path.exists():
        return {}
    return {r["name"]: Row(**r) for r in json.loads(path.read_text())}


def quiet() -> None:
    """One thread, since ranks are forked; no advice of libraries on generation."""
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def print_row(row: Row) -> None:
    cells = "; ".join(f"{column} {cell}" for column, cell in row.cells.items())
    print(f"{row.name}: capture {row.capture}; {cells} ({row.seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
