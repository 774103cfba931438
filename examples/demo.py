"""Train a small Llama on 4 local ranks that is too large for one, and compare with one device.

The planner gets the model, the batch and a memory limit per rank, and decides the rest. Both runs
start from the same weights and read the same batches, so the loss curves must coincide.
Everything it writes lies in demo-output/. Exit code 1 if the curves differ.
"""

from __future__ import annotations

import argparse
import json
import os
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
from text import VOCABULARY, batches

RANKS = 4
BATCH, SEQUENCE = 8, 128
LEARNING_RATE = 3e-4
WEIGHTS_SEED, EXAMPLE_SEED, DATA_SEED = 0, 1, 2
# One rank alone would need more than twice as much for parameters, gradients and AdamW states.
MEMORY_LIMIT = "48MiB"
TOLERANCE = 1e-4
OUTPUT = Path("demo-output")


def build_model() -> LlamaForCausalLM:
    """Random weights, the same in every process."""
    torch.manual_seed(WEIGHTS_SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
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
    """The training loop of both runs; `step` runs forward and backward and returns the loss."""
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
    losses = []
    for batch in batches(BATCH, SEQUENCE, steps, DATA_SEED):
        losses.append(float(step(batch)))
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


def train_on_rank(plan_file: str, curve_file: str, steps: int) -> None:
    """What each of the ranks runs; the lines that differ from one device are the first three."""
    program = autopar.compile(
        build_model(),
        example_inputs=example(),
        global_batch_size=BATCH,
        plan=autopar.Plan.load(plan_file),
    )
    losses = train(program.step, program.parameters(), steps)
    if torch.distributed.get_rank() == 0:
        Path(curve_file).write_text(json.dumps(losses))


def chart(one: list[float], many: list[float], height: int = 12) -> str:
    """Both curves in one grid of characters: `o` one device, `x` ranks, `●` where they coincide."""
    low, high = min(one + many), max(one + many)
    row = [[round((high - y) / (high - low or 1) * (height - 1)) for y in c] for c in (one, many)]
    lines = []
    for level in range(height):
        cells = [
            "●" if a == b == level else "o" if a == level else "x" if b == level else " "
            for a, b in zip(*row, strict=True)
        ]
        lines.append(f"{high - (high - low) * level / (height - 1):7.3f} ┤ {' '.join(cells)}")
    return "\n".join([*lines, f"{'':8}└{'─' * (2 * len(one))} step {len(one)}"])


def show_curves(console: Console, one: list[float], many: list[float]) -> float:
    """Print both curves; returns their largest relative difference."""
    differences = [abs(a - b) / abs(a) for a, b in zip(one, many, strict=True)]
    table = Table("step", "one device", f"{RANKS} ranks", "relative difference")
    every = max(1, len(one) // 8)
    for index in sorted({*range(0, len(one), every), len(one) - 1}):
        table.add_row(
            str(index + 1),
            f"{one[index]:.6f}",
            f"{many[index]:.6f}",
            f"{differences[index]:.1e}",
        )
    console.print(table)
    console.print(chart(one, many), markup=False, highlight=False)
    console.print("o one device   x ranks   ● both", markup=False)
    return max(differences)


def make_plan(console: Console) -> Path:
    plan = autopar.plan(
        build_model(),
        f"cpu:{RANKS}",
        example_inputs=example(),
        global_batch_size=BATCH,
        memory_limit=MEMORY_LIMIT,
    )
    path = OUTPUT / "plan.json"
    plan.save(path)
    console.print(
        f"plan: {plan.mesh}, ZeRO {plan.zero}, recompute {plan.recompute_label}, "
        f"{plan.microbatches} micro-batches of {plan.microbatch}, schedule {plan.schedule}"
    )
    return path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40, help="training steps of both runs")
    steps = parser.parse_args().steps
    console = Console()
    OUTPUT.mkdir(exist_ok=True)
    curves = OUTPUT / "curves.json"

    console.rule(f"plan for {RANKS} ranks of {MEMORY_LIMIT}")
    plan_file = make_plan(console)

    console.rule(f"train {steps} steps on {RANKS} ranks")
    start = time.monotonic()
    autopar.launch(train_on_rank, RANKS, str(plan_file), str(curves), steps)
    many = json.loads(curves.read_text())
    console.print(f"{time.monotonic() - start:.0f} s")

    console.rule(f"train {steps} steps on one device")
    start = time.monotonic()
    torch.set_num_threads(os.cpu_count() or 1)
    one = train_on_one_device(steps)
    console.print(f"{time.monotonic() - start:.0f} s")

    curves.write_text(json.dumps({"one_device": one, "ranks": many}, indent=1) + "\n")
    worst = show_curves(console, one, many)
    equal = worst <= TOLERANCE
    console.print(
        f"largest relative difference {worst:.1e} "
        f"({'within' if equal else 'OVER'} the tolerance of {TOLERANCE:.0e})"
    )
    for name in ("plan.json", "report.html", "curves.json"):
        if (OUTPUT / name).exists():
            console.print(f"{OUTPUT / name}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
