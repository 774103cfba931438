"""A zero-bubble pipeline on ranks: the order that runs, what is kept, and when gradients are summed
(values and gradients on models: test_equality.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.cost.pipeline import actions
from autopar.mesh import Mesh
from tests.runtime.test_state import make_program
from tests.runtime.toy import make_batch
from tests.warm_ranks import run_on_ranks

MICROBATCHES = 6


def seen(zero: int, schedule: str, chunks: int) -> dict[str, Any]:
    """On each rank: the actions as they ran, what torch holds between halves, where gradients of
    which parameters were there, and gradients beside those of interleaved 1F1B."""
    from autopar.runtime.zero_bubble import DividedStage

    options: dict[str, Any] = {
        "mesh": Mesh(pp=2, dp=2),
        "microbatches": MICROBATCHES,
        "zero": zero,
    }
    program = make_program({**options, "schedule": schedule, "chunks": chunks})
    ran: list[str] = []
    held: list[int] = []
    names = {"forward_one_chunk": "F", "backward_one_chunk": "I", "backward_weight_one_chunk": "W"}
    originals = {name: getattr(DividedStage, name) for name in names}

    def watch(name: str) -> Any:
        def watched(self: Any, number: int, *args: Any, **kwargs: Any) -> Any:
            chunk = program.plan.stage_indexes(program.ranks.index("pp")).index(self.stage_index)
            ran.append(f"{names[name]}{number}" + (f".{chunk}" if chunk else ""))
            result = originals[name](self, number, *args, **kwargs)
            if names[name] == "I" and not self.is_first:
                inputs, _, outputs, gradients = self.backward_state[number]
                held.append(len(inputs) + len(outputs) + (gradients is not None))
            return result

        return watched

    for name in names:
        setattr(DividedStage, name, watch(name))
    batch = make_batch(program.plan.global_batch)
    loss = program.step(batch)
    for name, original in originals.items():
        setattr(DividedStage, name, original)
    found = program.full_gradients()
    evaluated = program.eval().step(batch)
    other = make_program({**options, "schedule": "1f1b"})
    expected_loss = other.step(batch)
    expected = other.full_gradients()
    everywhere = [{}, {}]
    for part, values in zip(everywhere, (found, expected), strict=True):
        torch.distributed.all_gather_object(gathered := [None] * 4, values)
        for some in gathered:
            part.update(some)
    found, expected = everywhere
    errors = [float((found[n] - g).abs().max()) for n, g in expected.items()]
    left = [len(s.backward_state) for s in program._stage.stages]
    return {
        "rank": program.ranks.index("pp"),
        "ran": ran,
        "held": sum(held),
        "left": sum(left),
        "error": max(errors, default=0.0),
        "alike": set(found) == set(expected),
        "losses": [float(x) for x in (loss, evaluated, expected_loss)],
    }


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2)]
)
def test_runs_in_the_order_that_is_planned(zero: int, schedule: str, chunks: int) -> None:
    for found in run_on_ranks(seen, 4, (zero, schedule, chunks), timeout_seconds=100):
        order = actions(schedule, 2, MICROBATCHES, chunks)[found["rank"]]
        assert found["ran"] == [str(action) for action in order]
        assert found["held"] == 0
        assert found["left"] == 0
        assert found["alike"] and found["error"] < 1e-12
        first, *others = found["losses"]
        assert others == pytest.approx([first, first], rel=1e-12)


def overlapped() -> list[int]:
    """How many buckets of gradients were on their way when the last backward of the step ended."""
    from autopar.runtime import gradients
    from autopar.runtime.zero_bubble import DividedStage

    gradients.BUCKET_BYTES = 1
    program = make_program(
        {
            **{"mesh": Mesh(pp=2, dp=2), "schedule": "zero-bubble", "chunks": 2},
            **{"microbatches": 4, "zero": 0},
        }
    )
    sent: list[int] = []
    after = DividedStage.backward_weight_one_chunk

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        after(self, *args, **kwargs)
        sums = self._engine._sums
        sent.append(sum(s._sent for s in sums) - sum(len(s._buckets) for s in sums))

    DividedStage.backward_weight_one_chunk = watched  # type: ignore[method-assign]
    program.step(make_batch(program.plan.global_batch))
    DividedStage.backward_weight_one_chunk = after  # type: ignore[method-assign]
    torch.distributed.barrier()
    return sent


def test_gradients_of_zero_0_leave_while_the_last_halves_run() -> None:
    for sent in run_on_ranks(overlapped, 4, timeout_seconds=60):
        # Nothing before the last micro-batch of a stage; then every bucket, before the step ends.
        assert sent.count(0) == 2 and sent[-1] == 0
        assert all(left < 0 for left in sent[:-3])
