"""Published configurations next to what the free search finds for the same model and cluster.

Both are priced by the same evaluator, as the runtime of this package would execute them, in
bf16-mixed with AdamW: what is compared is the plan, not the framework. Reads the tables that
`make validate` reads and writes docs/published-plans.md; exit code 1 when a published plan that
fits is faster than the plan found.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from autopar.block_cost import Alternative, ChainCost
from autopar.cost.setting import Practice
from autopar.mesh import Mesh
from autopar.passes.capture import capture
from autopar.search.enumerate import search
from autopar.search.options import SearchOptions
from autopar.search.result import SearchResult
from autopar.units import format_bytes, format_seconds
from autopar.workflow.configuration import Configuration
from autopar.workflow.configuration_row import RowConfiguration, read_row
from autopar.workflow.evaluator import Evaluator, Prediction, whole_chain
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.prepare import prepare
from autopar.workflow.reported_practice import InexpressibleError
from autopar.workflow.row_model import build

OUT = Path(__file__).resolve().parent.parent / "docs" / "published-plans.md"
# Source (its first words), model, GPUs: the first row of them that can be expressed.
CHOSEN = (
    ("BigScience BLOOM final", "BLOOM-176B", 384),
    ("BigScience BLOOM prequel", "GPT 200B (BLOOM sweep)", 160),
    ("Korthikanti", "GPT 22B", 8),
    ("Korthikanti 2022 Table 5", "GPT 530B", 280),
    ("Korthikanti 2022 Table 5", "GPT 1T", 512),
    ("Korthikanti 2022 s6.3", "GPT 530B", 2240),
    ("MT-NLG", "MT-NLG 530B", 2800),
    ("MegaScale", "GPT 175B (MegaScale)", 1024),
    ("MegaScale", "GPT 175B (MegaScale)", 3072),
    ("Megatron-LM SC21", "GPT 18.4B", 256),
    ("Megatron-LM SC21", "GPT 76.1B", 1024),
    ("Megatron-LM SC21", "GPT 310.1B", 1920),
    ("Megatron-LM SC21", "GPT 1008B", 3072),
    ("MosaicML", "MPT-70b", 64),
    ("MosaicML", "MPT-30b", 256),
    ("NVIDIA DGX Cloud benchmarking 24.11", "nemotron4-340b", 256),
    ("NVIDIA DGX Cloud benchmarking 24.11", "gpt3-175b", 256),
    ("nanotron", "Llama-like 80B", 256),
    ("torchtitan benchmarks", "Llama-3.1-70B", 256),
    ("torchtitan docs", "Llama-3.1-405B", 128),
    ("vTrain", "GPT h12288 L96 (175B)", 512),
)
EXAMPLE_SEQUENCE = 2048


class WholeModel:
    """The prices of a stand-in of two layers, as those of a model with `layers` of them."""

    def __init__(self, costs: ModelCosts, layers: int) -> None:
        self.costs, self.layers = costs, layers
        blocks = self._whole(costs.optimistic(1, 1)).blocks
        self.block_names = tuple(b.name for b in blocks)
        self.holds_parameters = tuple(b.parameters > 0 for b in blocks)

    def _whole(self, chain: ChainCost) -> ChainCost:
        return replace(chain, blocks=tuple(whole_chain(chain, self.layers)[0]))

    def tp_degrees(self, limit: int) -> list[int]:
        return self.costs.tp_degrees(limit)

    def microbatch_sizes(self, most: int) -> list[int]:
        return self.costs.microbatch_sizes(most)

    def alternatives(self, tp: int, microbatch: int) -> Sequence[Alternative]:
        return [
            Alternative(a.boundary, self._whole(a.least), lambda a=a: self._whole(a.price()))
            for a in self.costs.alternatives(tp, microbatch)
        ]

    def optimistic(self, tp: int, microbatch: int) -> ChainCost:
        return self._whole(self.costs.optimistic(tp, microbatch))


@dataclass(frozen=True)
class Compared:
    """A published plan, priced, and the result of the search; `limit`: bytes of a rank."""

    row: Mapping[str, str]
    theirs: Prediction
    ours: SearchResult
    limit: int
    seconds: float

    @property
    def fits(self) -> bool:
        return self.their_peak <= self.limit

    @property
    def their_peak(self) -> int:
        return max(stage.total for stage in self.theirs.evaluation.memory_per_stage)

    @property
    def gain(self) -> float:
        """How much longer the published plan's step is, as a part of ours."""
        assert self.ours.choice is not None
        return self.theirs.step_seconds / self.ours.choice.step_seconds - 1

    @property
    def beaten(self) -> bool:
        """The published plan fits and is the faster one: it must never be."""
        return self.ours.choice is None or (self.fits and self.gain < -1e-9)


def compare(rows: Sequence[tuple[Mapping[str, str], RowConfiguration]]) -> list[Compared]:
    """Price the plans of rows that are of one problem, and search one for it."""
    first = rows[0][1]
    model, inputs = build(first.model, EXAMPLE_SEQUENCE, torch.bfloat16)
    program = capture(model, inputs, name="row", dtype=torch.bfloat16)
    prepared = prepare(program, dict(program.sizes))
    evaluator = Evaluator(prepared)
    as_run = [_as_this_runtime(read.configuration) for _, read in rows]
    theirs = [evaluator.predict(c, first.layers) for c in as_run]
    configuration = as_run[0]
    options = SearchOptions(
        configuration.microbatch * configuration.microbatches * configuration.mesh.dp,
        precision="bf16-mixed",
        alternatives=0,
    )
    begin = time.perf_counter()
    sizes = dict(prepared.sizes) | {"sequence": configuration.sequence}
    costs = ModelCosts(prepared, configuration.cluster, sizes)
    ours = search(WholeModel(costs, first.layers), configuration.cluster, options, explain=False)
    limit, seconds = options.limit(configuration.cluster), time.perf_counter() - begin
    return [
        Compared(row, priced, ours, limit, seconds)
        for (row, _), priced in zip(rows, theirs, strict=True)
    ]


def _as_this_runtime(configuration: Configuration) -> Configuration:
    return replace(
        configuration,
        practice=Practice(),
        precision="bf16-mixed",
        regathers=False,
        host_layer_seconds=0.0,
    )


def mesh_text(mesh: Mesh) -> str:
    shard = mesh.dp_shard if mesh.dp_replicate > 1 else 1
    degrees = ("pp", mesh.pp), ("dp", mesh.dp), ("tp", mesh.tp), ("shard", shard)
    return " ".join(f"{a}{n}" for a, n in degrees if n > 1)


def theirs_text(found: Compared) -> str:
    c = found.theirs.configuration
    schedule = f", interleaved ×{c.chunks}" if c.chunks > 1 else ""
    return (
        f"{mesh_text(c.mesh)}, ZeRO {c.zero}, {c.microbatches}×{c.microbatch}{schedule}, "
        f"recompute {c.recompute}"
    )


def ours_text(found: Compared) -> str:
    c = found.ours.choice
    if c is None:
        return "none fits"
    chunks = getattr(c.setting, "chunks", 1)
    schedule = f", interleaved ×{chunks}" if chunks > 1 else ""
    return (
        f"{mesh_text(c.mesh)}, ZeRO {c.zero}, {c.setting.microbatches}×{c.microbatch}{schedule}, "
        f"recompute {c.recompute_label}"
    )


def why(found: Compared) -> str:
    """The time term in which the two plans differ most, and the memory if theirs is too much."""
    if found.ours.evaluation is None:
        return "-"
    ours, theirs = found.ours.evaluation.time_breakdown, found.theirs.evaluation.time_breakdown
    saved = {term: theirs.get(term, 0.0) - seconds for term, seconds in ours.items()}
    term = max(saved, key=lambda t: (abs(saved[t]), t))
    word = "less" if saved[term] > 0 else "more"
    text = f"{format_seconds(abs(saved[term]))} {word} {term.replace('_comm', ' communication')}"
    if not found.fits:
        text = (
            f"theirs needs {format_bytes(found.their_peak)} of {format_bytes(found.limit)}; {text}"
        )
    return text


def table_row(found: Compared) -> str:
    row, choice = found.row, found.ours.choice
    cells = [
        f"{row['model']}, {row['seq']}<br>{row['n_gpus']} × {row['gpu']}, batch {row['gbs']}",
        theirs_text(found),
        format_seconds(found.theirs.step_seconds),
        ours_text(found),
        "-" if choice is None else format_seconds(choice.step_seconds),
        "-" if choice is None else f"{found.gain:+.1%}",
        why(found),
        f"{found.seconds:.0f} s",
    ]
    return "| " + " | ".join(cells) + " |"


def document(found: Sequence[Compared]) -> str:
    titles = (
        "problem",
        "published plan",
        "step",
        "plan found",
        "step",
        "gain",
        "the difference",
        "search",
    )
    good = [f for f in found if not f.beaten]
    return "\n".join(
        [
            "# Published plans and what the search finds",
            "",
            "Made by `benchmarks/published_plans.py`. The same evaluator prices both plans, in",
            "bf16-mixed with AdamW, as this package's runtime runs them. What is compared is the",
            "plan, not the framework: the steps here are not those that were measured (see",
            "[validation.md](validation.md) for these). A plan found is proven optimal in the cost",
            "model and fits with the usual margin.",
            "",
            f"{len(good)} of {len(found)} plans found are at least as fast as the published one, or"
            " the published one does not fit by this model.",
            "",
            "| " + " | ".join(titles) + " |",
            "|" + " --- |" * len(titles),
            *map(table_row, found),
            "",
        ]
    )


def chosen_rows(table: Path) -> list[tuple[dict[str, str], RowConfiguration]]:
    """The rows of `CHOSEN` and what they say."""
    with table.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = []
    for source, model, gpus in CHOSEN:
        fitting = [
            (row, read)
            for row in rows
            if row["source"].startswith(source)
            and (row["model"], row["n_gpus"]) == (model, str(gpus))
            and (read := expressed(row)) is not None
        ]
        if not fitting:
            raise SystemExit(f"{table} has no row of {source}, {model} on {gpus} GPUs")
        found.append(fitting[0])
    return found


def expressed(row: dict[str, str]) -> RowConfiguration | None:
    try:
        return read_row(row)
    except InexpressibleError:
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("truth", type=Path, help="folder with core_validation.csv")
    parser.add_argument("--only", default="", help="models whose name contains this; no document")
    arguments = parser.parse_args()
    found = []
    for row, read in chosen_rows(arguments.truth / "core_validation.csv"):
        if arguments.only not in row["model"]:
            continue
        found += compare([(row, read)])
        print(table_row(found[-1]), flush=True)
    if not arguments.only:
        OUT.write_text(document(found), encoding="utf-8")
        print(f"wrote {OUT.name}")
    return 1 if any(f.beaten for f in found) else 0


if __name__ == "__main__":
    sys.exit(main())
