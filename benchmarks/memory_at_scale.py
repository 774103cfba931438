"""The memory model at scale: Llama-3-70B on 64 ranks, one rank of each stage in a dry run.

The runtime's own program of that rank, with torch's FakeTensorMode and "fake" process group: what
it allocates is seen, nothing is computed. Writes a section of benchmarks/RESULTS.md.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch

from autopar.api import search_program
from autopar.cluster import Cluster
from autopar.models import resolve_model
from autopar.passes.capture import capture
from autopar.workflow.dry_memory import dry_memory
from autopar.workflow.prepare import prepare
from memory_table import HEADER, error, row, summary, terms_within
from results import write_section

# global batch, pins
PLANS = (
    (64, "dp=64,tp=1,pp=1,zero=3,recompute=none"),
    (64, "dp=64,tp=1,pp=1,zero=3,recompute=full"),
    (64, "dp=64,tp=1,pp=1,zero=1,recompute=full"),
    (16, "dp=8,tp=8,pp=1,zero=1,recompute=full,microbatch=1,weights=split"),
    (16, "dp=8,tp=8,pp=1,zero=3,recompute=none,microbatch=1,weights=split"),
    (16, "dp=1,tp=8,pp=8,schedule=1f1b,recompute=none,microbatch=1,weights=split"),
    (16, "dp=1,tp=8,pp=8,schedule=1f1b,recompute=full,microbatch=1,weights=split"),
    (64, "dp=8,tp=1,pp=8,schedule=1f1b,zero=1,recompute=full,microbatch=1"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--plans", nargs="*", type=int, help="numbers of plans (default: all)")
    arguments = parser.parse_args()
    start = time.perf_counter()
    source = resolve_model("zoo:llama3-70b", sequence=arguments.sequence, dtype=torch.float32)
    program = capture(source.model, source.example_inputs, name=source.name, dtype=torch.bfloat16)
    program = prepare(program, program.sizes)
    lines, errors, terms = [], [], []
    for number, (batch, pins) in enumerate(PLANS):
        if arguments.plans and number not in arguments.plans:
            continue
        outcome = search_program(
            program, Cluster.parse("h100:8x8"), global_batch_size=batch, precision="bf16-mixed",
            pins=pins, memory_limit="10TiB", explain=False,
        )  # fmt: skip
        assert outcome.plan is not None
        last = outcome.plan.mesh.pp - 1
        for stage in sorted({0, last // 2, last}):
            peak = dry_memory(source.model, program, outcome.plan, stage)
            lines.append(row(outcome.plan, stage, peak))
            errors.append(error(outcome.plan, stage, peak))
            terms.append(terms_within(outcome.plan, stage, peak))
            print(f"{time.perf_counter() - start:.0f} s {lines[-1]}", flush=True)
    write_section(
        "Memory at scale: Llama-3-70B on 64 ranks",
        [
            "Made by `benchmarks/memory_at_scale.py`: one rank of a stage of the real program in a",
            f"dry run, sequence {arguments.sequence}, bf16-mixed, AdamW. MiB predicted / measured.",
            summary(errors, terms),
            "",
            *HEADER,
            *lines,
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
