"""The memory model against real ranks: bytes that a plan predicts, and bytes that were alive.

For every plan the demo's model runs two whole training steps on 4 local gloo ranks, the second one
with gradients, optimizer states and communication buffers all in place
(`autopar.runtime.live_bytes`; what one of torch's kernels allocates and frees is not seen). Writes
a section of benchmarks/RESULTS.md; every error is printed, good or bad.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

# The model and its data are the demo's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import autopar  # noqa: E402
from autopar.report.text import headline  # noqa: E402
from autopar.runtime.live_bytes import Peak  # noqa: E402
from autopar.workflow.dry_memory import measured_step  # noqa: E402
from demo import BATCH, RANKS, build_model, example  # noqa: E402
from memory_table import HEADER, error, row, summary, terms_within  # noqa: E402
from results import write_section  # noqa: E402

PINS = (
    "dp=4,zero=0",
    "dp=4,zero=1",
    "dp=4,zero=2",
    "dp=4,zero=3",
    "dp=4,zero=3,recompute=full",
    "tp=2,dp=2,zero=3,weights=split",
    "tp=2,dp=2,zero=3,recompute=full,microbatch=1,weights=split",
    "tp=2,pp=2,schedule=1f1b,microbatch=1,weights=split",
    "tp=2,pp=2,schedule=1f1b,microbatch=1,recompute=full,weights=split",
    "pp=4,schedule=1f1b,microbatch=1",
    "pp=2,schedule=1f1b,dp=2,zero=1,microbatch=1",
)


def measure_on_rank(plans: list[dict[str, Any]]) -> list[tuple[int, Peak]]:
    """(stage, fullest moment of the second step) of this rank for each plan."""
    found = []
    for document in plans:
        program = autopar.compile(
            build_model(),
            example_inputs=example(),
            global_batch_size=BATCH,
            plan=autopar.Plan.from_dict(document),
        )
        found.append((program.ranks.index("pp"), measured_step(program)))
    return found


def rows(
    plans: list[autopar.Plan], measured: list[list[tuple[int, Peak]]]
) -> tuple[list[str], list[float], list[int]]:
    """A line per stage: predicted, and what its fullest rank held; all errors; terms in 10 %."""
    lines, errors, terms = [], [], []
    for index, plan in enumerate(plans):
        for number in range(plan.mesh.pp):
            peaks = [peak for stage, peak in (rank[index] for rank in measured) if stage == number]
            fullest = max(peaks, key=lambda peak: peak.total)
            lines.append(row(plan, number, fullest))
            errors.append(error(plan, number, fullest))
            terms.append(terms_within(plan, number, fullest))
            print(lines[-1], flush=True)
    return lines, errors, terms


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pins", nargs="*", default=PINS, help="plans to measure")
    plans = []
    for pins in parser.parse_args().pins:
        plan = autopar.plan(
            build_model(), f"cpu:{RANKS}", example_inputs=example(), global_batch_size=BATCH,
            pins=pins,
        )  # fmt: skip
        plans.append(plan)
        print(headline(plan), flush=True)
    measured = autopar.launch(measure_on_rank, RANKS, [plan.to_dict() for plan in plans])
    lines, errors, terms = rows(plans, measured)
    write_section(
        "Memory: predicted and alive",
        [
            f"Made by `benchmarks/memory.py`: the demo's Llama on {RANKS} gloo ranks, global batch",
            f"{BATCH}, float32, AdamW (foreach). MiB predicted / measured per rank at the fullest",
            "moment of a training step. A positive error is a prediction above what was alive.",
            summary(errors, terms),
            "",
            *HEADER,
            *lines,
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
