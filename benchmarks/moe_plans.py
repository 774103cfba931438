"""Plans of mixtures of experts on paper: what is chosen, why this ep, and what it took to prove.

    python benchmarks/moe_plans.py [--truth FOLDER] [--only NAME]

Every problem is searched freely; then ep is pinned to 1, half and twice the chosen degree with the
mesh as it is, to say what ep is worth. With a folder of published measurements (as for `make
validate`) the rows of these models are predicted too. Writes docs/moe-plans.md; exit code 1 when a
search is not proven or a pinned ep is faster than the plan.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from autopar.api import search_program
from autopar.cluster import Cluster
from autopar.mesh import EP, Mesh
from autopar.models import resolve_model
from autopar.passes.capture import capture
from autopar.program import Program
from autopar.search.result import Choice, SearchResult
from autopar.units import format_seconds
from autopar.workflow.configuration_table import predict_rows, read_table
from moe_layer import layer_rows

OUT = Path(__file__).resolve().parent.parent / "docs" / "moe-plans.md"
SEQUENCE = 4096
# Model, cluster, samples of a step.
PROBLEMS = (
    ("mixtral-8x7b", "h100:4x8", 256),
    ("mixtral-8x7b", "h100:32x8", 1024),
    ("mixtral-8x7b", "h100:256x8", 8192),
    ("mixtral-8x22b", "h100:16x8", 1024),
    ("mixtral-8x22b", "h100:256x8", 8192),
    ("qwen3-235b-a22b", "h100:32x8", 2048),
    ("qwen3-235b-a22b", "h100:256x8", 8192),
    ("deepseek-v3", "h100:64x8", 4096),
    ("deepseek-v3", "h100:256x8", 8192),
)
LAYERS = (
    "Baselines of single layers on 8 H100 (Megatron-LM, moe_perf) next to the same prices, at the"
    " clocks of a short run (`benchmarks/moe_layer.py`). Nothing was fitted on them."
)
MODELS = "mixtral|qwen3.?235b|deepseek.?v3"


@dataclass(frozen=True)
class Problem:
    """`seconds`: of the processor, for capture (once per model), front passes and search."""

    model: str
    cluster: Cluster
    batch: int
    result: SearchResult
    seconds: tuple[float, float]
    others: tuple[tuple[int, SearchResult], ...]

    @property
    def choice(self) -> Choice:
        assert self.result.choice is not None, f"no plan of {self.model} fits"
        return self.result.choice

    @property
    def proven(self) -> bool:
        """The gap is zero, and no other ep on this mesh is faster."""
        best = self.choice.step_seconds * (1 - 1e-9)
        return self.result.status == "optimal" and all(
            r.choice is None or r.choice.step_seconds >= best for _, r in self.others
        )


@cache
def captured(model: str) -> tuple[Program, float]:
    """The program of a model, and the processor's seconds for it."""
    begin = time.process_time()
    source = resolve_model(f"zoo:{model}", sequence=SEQUENCE, dtype=torch.bfloat16)
    program = capture(source.model, source.example_inputs, name=model, dtype=torch.bfloat16)
    return program, time.process_time() - begin


def searched(model: str, cluster: Cluster, batch: int, pins: str = "") -> SearchResult:
    """The best plan alone: no runners-up."""
    program, _ = captured(model)
    given = {"global_batch_size": batch, "precision": "bf16-mixed", "explain": False}
    return search_program(program, cluster, pins=pins, **given).result  # type: ignore[arg-type]


def solve(model: str, name: str, batch: int) -> Problem:
    cluster = Cluster.parse(name)
    _, capturing = captured(model)
    begin = time.process_time()
    result = searched(model, cluster, batch)
    seconds = capturing, time.process_time() - begin
    others = []
    if result.choice is not None:
        mesh = result.choice.mesh
        pins = f"pp={mesh.pp},dp={mesh.dp},cp={mesh.cp},tp={mesh.tp}"
        for ep in other_degrees(mesh, captured_experts(model)):
            others.append((ep, searched(model, cluster, batch, f"{pins},ep={ep}")))
    return Problem(model, cluster, batch, result, seconds, tuple(others))


def captured_experts(model: str) -> int:
    """Experts of a layer."""
    source = resolve_model(f"zoo:{model}", sequence=SEQUENCE, dtype=torch.bfloat16)
    config = source.model.config
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    return next(int(getattr(config, n)) for n in names if getattr(config, n, None))


def other_degrees(mesh: Mesh, experts: int) -> list[int]:
    """1, half and twice the ep of a mesh, where the experts and the replicas divide."""
    wanted = sorted({1, mesh.ep // 2, mesh.ep * 2} - {0, mesh.ep})
    return [ep for ep in wanted if experts % ep == 0 and mesh.replicas % ep == 0]


def plan_text(choice: Choice) -> str:
    chunks = f", interleaved ×{choice.chunks}" if choice.chunks > 1 else ""
    return (
        f"{choice.mesh}, ZeRO {choice.zero}, {choice.microbatches}×{choice.microbatch}{chunks}, "
        f"recompute {choice.recompute_label}"
    )


def exchange_text(found: Problem) -> str:
    """Seconds of exchanging rows in a step, and the slowest link that they cross."""
    mesh, terms = found.choice.mesh, found.result.time_breakdown
    if mesh.ep == 1:
        return "none"
    link = found.cluster.link_for(mesh.ep, mesh.stride(EP))
    seconds = terms["ep_comm"]
    return f"{format_seconds(seconds)} ({seconds / found.choice.step_seconds:.0%}), {link.name}"


def other_text(found: Problem) -> str:
    """What other degrees cost on this mesh: longer steps, or that none fits."""
    parts = []
    for ep, result in found.others:
        if result.choice is None:
            parts.append(f"ep {ep}: does not fit")
            continue
        slower = result.choice.step_seconds / found.choice.step_seconds - 1
        parts.append(f"ep {ep}: {slower:+.1%}, {_difference(found, result)}")
    return "<br>".join(parts) or "-"


def _difference(found: Problem, other: SearchResult) -> str:
    """The term in which another plan's step is most longer."""
    ours, theirs = found.result.time_breakdown, other.time_breakdown
    more = {t: theirs.get(t, 0.0) - ours.get(t, 0.0) for t in {*ours, *theirs}}
    term = max(more, key=lambda t: (more[t], t))
    word = term.replace("_comm", " communication")
    return f"{format_seconds(more[term])} more {word}"


def problem_row(found: Problem) -> str:
    capturing, searching = found.seconds
    cells = [
        f"{found.model}<br>{found.cluster.name}, batch {found.batch}",
        plan_text(found.choice),
        format_seconds(found.choice.step_seconds),
        exchange_text(found),
        other_text(found),
        f"{found.result.gap:.1%}",
        f"{capturing:.0f} s + {searching:.0f} s",
    ]
    return "| " + " | ".join(cells) + " |"


def published(truth: Path) -> list[str]:
    """A table of the published rows of these models: measured and predicted, or why not."""
    _, rows = read_table(truth / "core_validation.csv")
    rows = [r for r in rows if _is_ours(r)]
    lines, missing = [], dict[str, int]()
    for row, seen in zip(rows, predict_rows(rows), strict=True):
        measured = row.get("step_time_norm_s") or ""
        if seen.step_seconds is None or not measured:
            missing[seen.status] = missing.get(seen.status, 0) + 1
            continue
        degrees = " ".join(f"{k}{row[k]}" for k in ("pp", "vp", "dp", "tp", "ep") if row.get(k))
        error = seen.step_seconds / float(measured) - 1
        cells = f"{row['model']}, {row['n_gpus']} × {row['gpu']} | {degrees}, {seen.recompute}"
        lines.append(f"| {cells} | {measured} | {seen.step_seconds:.3f} | {error:+.1%} |")
    why = [f"- {count} rows: {text}" for text, count in sorted(missing.items())]
    head = ["| row | degrees, recompute | measured s | predicted s | error |", "|" + " --- |" * 5]
    return [*head, *lines, "", "Rows of these models that can't be predicted:", "", *why, ""]


def _is_ours(row: dict[str, str]) -> bool:
    return bool(row.get("topk")) and bool(re.search(MODELS, row.get("model") or "", re.I))


def document(lines: Sequence[str], rows: Sequence[str], layers: Sequence[str]) -> str:
    """The page. `lines`: those of the first problems; the others are named as not searched."""
    titles = ("problem", "plan", "step", "exchanges", "other ep", "gap", "capture + search")
    head = [
        "# Plans of mixtures of experts",
        "",
        f"Made by `benchmarks/moe_plans.py`: sequences of {SEQUENCE} tokens, bf16-mixed, AdamW,"
        " rows that fall on experts by chance. `exchanges`: seconds of a step, its part, and the"
        " slowest link that rows cross. `other ep`: the best plan with the mesh as it is and"
        " another ep, and the term that grows most. Seconds of planning are the processor's;"
        " gap 0 is proven.",
        "",
        "| " + " | ".join(titles) + " |",
        "|" + " --- |" * len(titles),
        *lines,
        "",
    ]
    if left := PROBLEMS[len(lines) :]:
        names = ", ".join(f"{model} on {cluster}" for model, cluster, _ in left)
        head += [f"Not searched in this run: {names}.", ""]
    if rows:
        head += ["## Published runs of these models", "", *rows]
    if layers:
        head += ["## One layer", "", LAYERS, "", *layers]
    return "\n".join(head).rstrip("\n") + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--truth", type=Path, help="folder with core_validation.csv")
    parser.add_argument("--only", default="", help="models whose name contains this; no document")
    arguments = parser.parse_args()
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    rows = published(arguments.truth) if arguments.truth else []
    layers = layer_rows(arguments.truth) if arguments.truth else []
    found, lines = [], list[str]()
    for model, cluster, batch in PROBLEMS:
        if arguments.only not in model:
            continue
        found.append(solve(model, cluster, batch))
        lines.append(problem_row(found[-1]))
        print(lines[-1], flush=True)
        if not arguments.only:  # a run that is stopped leaves what it has found
            OUT.write_text(document(lines, rows, layers), encoding="utf-8")
    return 0 if all(f.proven for f in found) else 1


if __name__ == "__main__":
    sys.exit(main())
