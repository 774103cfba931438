"""Train a small Llama on 4 local ranks, none of which can hold it, and compare with one device.

The planner gets the model, the batch and a memory limit per rank; nothing here names a way to
split it. The tighter the limit, the more it has to combine. The plans of the tight limits then
train for real: all runs start from the same weights and read the same text, so their loss curves
must coincide. Everything is written to demo-output/. Exit code 1 if a curve differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.api import search_plan
from autopar.commands.plan import write_page
from autopar.report.facts import Facts
from autopar.units import format_bytes, format_seconds
from chart import chart
from text import VOCABULARY, batches

RANKS = 4
BATCH, SEQUENCE = 8, 128
LEARNING_RATE = 1e-3
WEIGHTS_SEED, EXAMPLE_SEED, DATA_SEED = 0, 1, 2
# Parameters, gradients and the two states of AdamW, all float32.
STATE_BYTES = 16
# The first is no limit for this model; the others are below what one rank would need, and force
# the planner to combine. Only these are trained.
ROOMY, TIGHT = "1GiB", ("24MiB", "14MiB")
TOLERANCE = 1e-5
OUTPUT = Path("demo-output")


def build_model() -> LlamaForCausalLM:
    """Random weights, the same in every process. Six heads do not divide over four ranks."""
    torch.manual_seed(WEIGHTS_SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=SEQUENCE,
    )
    return LlamaForCausalLM(config)


def example() -> dict[str, torch.Tensor]:
    return next(batches(BATCH, SEQUENCE, steps=1, seed=EXAMPLE_SEED))


def train(
    step: Callable[[dict[str, torch.Tensor]], Any],
    parameters: Iterable[torch.nn.Parameter],
    steps: int,
) -> list[float]:
    """The training loop of every run; `step` runs forward and backward and returns the loss."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    losses = []
    for batch in batches(BATCH, SEQUENCE, steps, DATA_SEED):
        losses.append(float(step(batch)))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def train_on_one_device(steps: int) -> list[float]:
    model = build_model()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        return loss.detach()

    return train(step, model.parameters(), steps)


def train_on_rank(plan_files: list[str], steps: int) -> list[list[float]]:
    """What each of the ranks runs; a script of your own needs only the call of `compile`."""
    curves = []
    for file in plan_files:
        program = autopar.compile(
            build_model(), example_inputs=example(), global_batch_size=BATCH, plan=file
        )
        curves.append(train(program.step, program.parameters(), steps))
    return curves


def make_plan(limit: str) -> autopar.Plan:
    """Search freely under the limit; writes the plan and its report."""
    cluster = autopar.Cluster.parse(f"cpu:{RANKS}")
    outcome = search_plan(
        build_model(), cluster, example_inputs=example(), global_batch_size=BATCH,
        memory_limit=limit, name="small-llama",
    )  # fmt: skip
    if outcome.plan is None:
        raise SystemExit(f"nothing fits {limit}")
    outcome.plan.save(OUTPUT / f"plan-{limit}.json")
    write_page(outcome, cluster, OUTPUT / f"report-{limit}.html")
    return outcome.plan


def techniques(plan: autopar.Plan) -> list[str]:
    """What the plan combines, in the field's words."""
    degrees = {"PP": plan.mesh.pp, "DP": plan.mesh.dp, "TP": plan.mesh.tp}
    found = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if plan.mesh.tp > 1 and plan.boundary.startswith("S("):
        found.append("sequence parallel")
    if plan.mesh.dp > 1 and plan.zero:
        found.append(f"ZeRO-{plan.zero}")
    if plan.recompute_label != "none":
        found.append(f"recompute {plan.recompute_label}")
    return found


def show_plans(console: Console, plans: dict[str, autopar.Plan]) -> bool:
    """One line per limit; true if every prediction is within its limit."""
    fits = True
    table = Table("limit", "the planner chose", "micro-batches", "fullest rank", "step")
    roomy = Facts.of(plans[ROOMY]).step_seconds or 0.0
    for limit, plan in plans.items():
        facts = Facts.of(plan)
        assert facts.peak_bytes and facts.memory_limit_bytes and facts.step_seconds
        fits &= facts.peak_bytes <= facts.memory_limit_bytes
        slower = f" ({facts.step_seconds / roomy - 1:+.0%})" if limit != ROOMY else ""
        table.add_row(
            limit, "\n".join(techniques(plan)), f"{plan.microbatches} x {plan.microbatch}",
            format_bytes(facts.peak_bytes), format_seconds(facts.step_seconds) + slower,
        )  # fmt: skip
    console.print(table)
    console.print(
        "Limit and memory are per rank. Memory and step are predictions; the step is that of a "
        "round-number CPU, not of this one. Each plan is proven the fastest that fits, so what a "
        "tight limit adds, the limit forced. There are two of them because PP, DP and TP of 2 at "
        f"the same time take 8 ranks, and this is a demonstration on {RANKS}."
    )
    return fits


def show_curves(console: Console, one: list[float], many: dict[str, list[float]]) -> float:
    """Print all curves; returns the largest relative difference from one device."""
    differences = [
        max(abs(curve[i] - one[i]) / abs(one[i]) for curve in many.values())
        for i in range(len(one))
    ]
    table = Table("step", "one device", *many, "largest relative difference", title="loss")
    every = max(1, len(one) // 6)
    for index in sorted({*range(0, len(one), every), len(one) - 1}):
        values = (one[index], *(curve[index] for curve in many.values()))
        table.add_row(
            str(index + 1), *(f"{value:.6f}" for value in values), f"{differences[index]:.1e}"
        )
    console.print(table)
    console.print(chart(one, list(many.values())), markup=False, highlight=False)
    return max(differences)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24, help="training steps of every run")
    steps = parser.parse_args().steps
    console = Console()
    OUTPUT.mkdir(exist_ok=True)
    clock = time.monotonic()

    def rule(text: str) -> None:
        console.rule(f"{text}  [dim]{time.monotonic() - clock:.0f} s")

    count = sum(p.numel() for p in build_model().parameters())
    need = format_bytes(count * STATE_BYTES)
    rule(f"plan a Llama of {count / 1e6:.1f} M parameters for {RANKS} ranks")
    console.print(f"parameters, gradients and AdamW states alone are {need} on one rank")
    plans = {limit: make_plan(limit) for limit in (ROOMY, *TIGHT)}
    fits = show_plans(console, plans)

    rule(f"train {steps} steps on {RANKS} ranks, with each plan of a tight limit")
    files = [str(OUTPUT / f"plan-{limit}.json") for limit in TIGHT]
    curves = autopar.launch(train_on_rank, RANKS, files, steps)[0]
    rule(f"train {steps} steps on one device")
    torch.set_num_threads(1)  # as each rank has
    one = train_on_one_device(steps)
    rule("compare")
    many = dict(zip(TIGHT, curves, strict=True))
    (OUTPUT / "curves.json").write_text(json.dumps({"one device": one, **many}, indent=1) + "\n")
    worst = show_curves(console, one, many)
    equal = worst <= TOLERANCE
    console.print(
        f"largest relative difference {worst:.1e}, {'within' if equal else 'OVER'} {TOLERANCE:.0e}"
    )
    rule("written")
    for limit in plans:
        console.print(f"{limit:>6}  {OUTPUT}/plan-{limit}.json  {OUTPUT}/report-{limit}.html")
    console.print(f"curves  {OUTPUT}/curves.json   (each report shows its pipeline's timeline)")
    return 0 if equal and fits else 1


if __name__ == "__main__":
    sys.exit(main())
