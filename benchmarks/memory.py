"""The memory model against real ranks: bytes that a plan predicts, and bytes that were alive.

For every plan the demo's model runs two whole training steps on 4 local gloo ranks, the second one
with gradients, optimizer states and communication buffers all in place. A dispatch mode sees the
storage behind each op's results (what it misses: temporaries inside one op or collective).
Writes the second half of benchmarks/RESULTS.md; every error is printed, good or bad.
"""

from __future__ import annotations

import argparse
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# The model and its data are the demo's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import autopar  # noqa: E402
from autopar.report.text import headline  # noqa: E402
from demo import BATCH, RANKS, build_model, example  # noqa: E402
from results import write_section  # noqa: E402

PINS = (
    "dp=4,zero=0",
    "dp=4,zero=1",
    "dp=4,zero=2",
    "dp=4,zero=3",
    "dp=4,zero=3,recompute=full",
    "tp=2,dp=2,zero=3,weights=split",
    "tp=2,dp=2,zero=3,recompute=full,microbatch=1,weights=split",
    "tp=2,pp=2,microbatch=1,weights=split",
    "tp=2,pp=2,microbatch=1,recompute=full,weights=split",
    "pp=4,microbatch=1",
    "pp=2,dp=2,zero=1,microbatch=1",
)
MIB = 2**20


class LiveBytes(TorchDispatchMode):
    """Bytes of all CPU storages that are alive after an op; `peak` is the most seen."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, Any] = {}

    def add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            # A DTensor or a collective's result in flight is a shell around the rank's own part.
            for part in ("_local_tensor", "elem"):
                tensor = getattr(tensor, part, tensor)
            if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._alive:
                self._alive[key] = weakref.ref(storage, lambda _, k=key: self._alive.pop(k, None))

    def bytes(self) -> int:
        # Summed anew each time: FSDP resizes storages in place.
        return sum(s.nbytes() for r in list(self._alive.values()) if (s := r()) is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(tree_leaves(result))
        self.peak = max(self.peak, self.bytes())
        return result


def measure_on_rank(plans: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """(stage, peak bytes of the second step) of this rank for each plan."""
    found = []
    batch = example()
    for document in plans:
        plan = autopar.Plan.from_dict(document)
        program = autopar.compile(
            build_model(), example_inputs=batch, global_batch_size=BATCH, plan=plan
        )
        parameters = list(program.parameters())
        optimizer = torch.optim.AdamW(parameters)
        live = LiveBytes()
        live.add(parameters)
        with live:
            for _ in range(2):
                live.peak = 0
                program.step(batch)
                optimizer.step()
                optimizer.zero_grad()
        found.append((program.ranks.index("pp"), live.peak))
    return found


def rows(plans: list[autopar.Plan], measured: list[list[tuple[int, int]]]) -> list[str]:
    """A line per plan: its fullest stage as predicted, and what that stage's ranks held."""
    lines = []
    for index, plan in enumerate(plans):
        predicted = [stage["total"] for stage in plan.predicted["memory_per_stage"]]
        real = [
            max(peak for stage, peak in (rank[index] for rank in measured) if stage == number)
            for number in range(len(predicted))
        ]
        errors = [p / r - 1 for p, r in zip(predicted, real, strict=True)]
        cells = (
            headline(plan),
            " ".join(f"{p / MIB:.1f}" for p in predicted),
            " ".join(f"{r / MIB:.1f}" for r in real),
            " ".join(f"{e:+.1%}" for e in errors),
        )
        lines.append("| " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    return lines


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
    write_section(
        "Memory: predicted and alive",
        [
            f"Made by `benchmarks/memory.py`: the demo's Llama on {RANKS} gloo ranks, global batch",
            f"{BATCH}, float32, AdamW. MiB per rank at the fullest moment of a training step,",
            "one figure per stage. A positive error is a prediction above what was alive; `alive`",
            "misses temporaries inside one op or collective.",
            "",
            "| plan | predicted | alive | error |",
            "| --- | --- | --- | --- |",
            *rows(plans, measured),
        ],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
