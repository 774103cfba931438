"""Published configurations against the free search: a sample of all that can be expressed.

    python benchmarks/published_sample.py FOLDER_OF_TRUTH [--every N]

A problem is a model, sequence, cluster and global batch; its published plans are all rows of it.
Every N-th problem, in the order of the table, is searched freely and its plans are priced by the
same evaluator (as in `published_plans.py`). Left out: rows with experts or context parallelism.
Writes docs/published-sample.md; exit code 1 when a published plan that fits is faster.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections import Counter
from pathlib import Path

from autopar.errors import AutoparError
from autopar.workflow.configuration_row import RowConfiguration
from published_plans import Compared, compare, expressed

OUT = Path(__file__).resolve().parent.parent / "docs" / "published-sample.md"
Problem = list[tuple[dict[str, str], RowConfiguration]]
SAME = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq", "gpu", "n_gpus", "gbs")


def problems(table: Path) -> list[Problem]:
    """All of them, in the order of their first rows."""
    found: dict[tuple[str, ...], Problem] = {}
    with table.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["n_experts"] not in ("", "0") or row["cp"] not in ("", "1"):
                continue
            read = expressed(row)
            if read is not None:
                cluster = read.configuration.cluster.name
                key = (*(row[name] for name in SAME), cluster, repr(read.model))
                found.setdefault(key, []).append((row, read))
    return list(found.values())


def lines(found: list[Compared]) -> list[str]:
    """A table by source."""
    table = [
        "| source | plans | at least as fast | does not fit by this model | slower |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    kinds: dict[str, Counter[str]] = {}
    for f in found:
        kinds.setdefault(f.row["source"], Counter())[
            "slower" if f.beaten else "faster" if f.fits else "misfit"
        ] += 1
    for source, count in kinds.items():
        cells = (count[k] for k in ("faster", "misfit", "slower"))
        table.append(f"| {source} | {sum(count.values())} | " + " | ".join(map(str, cells)) + " |")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("truth", type=Path, help="folder with core_validation.csv")
    parser.add_argument("--every", type=int, default=10, help="one of so many problems")
    arguments = parser.parse_args()
    every = problems(arguments.truth / "core_validation.csv")
    found: list[Compared] = []
    searched = proven = 0
    for problem in every[:: arguments.every]:
        row = problem[0][0]
        name = f"{row['source']}, {row['model']} on {row['n_gpus']} x {row['gpu']}"
        try:
            compared = compare(problem)
        except AutoparError as error:
            print(f"{name}: {error}", flush=True)
            continue
        first = compared[0].ours
        searched, proven = searched + 1, proven + (first.gap == 0)
        found += compared
        worst = min(f.gain for f in compared) if first.choice else float("nan")
        told = f"{len(compared)} plans, at least {worst:+.1%}, {compared[0].seconds:.0f} s"
        print(f"{name}, batch {row['gbs']}: {told}", flush=True)
    slower = sum(f.beaten for f in found)
    text = [
        "# A sample of published plans against the free search",
        "",
        f"Made by `benchmarks/published_sample.py --every {arguments.every}`: of {len(every)}"
        " problems (a model, sequence,",
        f"cluster and global batch) that can be expressed {searched} are searched freely, {proven}"
        " with a proof, and the",
        f"{len(found)} plans published for them are priced by the same evaluator.",
        f"{len(found) - slower} of them are no faster than the plan found, or do not fit.",
        "",
        *lines(found),
        "",
    ]
    OUT.write_text("\n".join(text), encoding="utf-8")
    print("\n".join(text))
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
