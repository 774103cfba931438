"""What a pipelined stage holds while it runs (values and gradients: test_program.py)."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.mesh import Mesh
from tests.runtime.test_state import make_program
from tests.runtime.toy import make_batch
from tests.warm_ranks import run_on_ranks

MICROBATCHES = 6


def held() -> dict[str, tuple[list[int], int]]:
    """Receive buffers alive at most, by stage of this rank, and in all after two steps."""
    from autopar.runtime.pipeline_stage import PlannedStage

    found = {}
    forward = PlannedStage.forward_one_chunk
    for schedule, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        options: dict[str, Any] = {"mesh": Mesh(pp=2), "schedule": schedule, "chunks": chunks}
        program = make_program({**options, "microbatches": MICROBATCHES})
        stages = program._stage.stages
        most = dict.fromkeys(stages, 0)

        def alive(stage: Any) -> int:
            infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
            return sum(info.buffer is not None for group in infos for info in group)

        def watched(self: Any, *args: Any, most: Any = most, alive: Any = alive, **kw: Any) -> Any:
            most[self] = max(most[self], alive(self))
            return forward(self, *args, **kw)

        PlannedStage.forward_one_chunk = watched  # type: ignore[method-assign]
        for step in range(2):
            program.step(make_batch(program.plan.global_batch, step))
        PlannedStage.forward_one_chunk = forward  # type: ignore[method-assign]
        found[schedule] = (list(most.values()), sum(map(alive, stages)))
    return found


@pytest.fixture(scope="module")
def buffers() -> list[dict[str, tuple[list[int], int]]]:
    return run_on_ranks(held, 2, timeout_seconds=60)


def test_buffers_live_from_receipt_to_backward(
    buffers: list[dict[str, tuple[list[int], int]]],
) -> None:
    first, last = buffers
    # The first stage receives gradients only, each used at once; GPipe's last stage holds every
    # microbatch's input, 1F1B's holds one.
    assert first["gpipe"] == first["1f1b"] == ([0], 0)
    assert last["gpipe"] == ([MICROBATCHES], 0)
    assert last["1f1b"] == ([1], 0)


def test_interleaved_stages_hold_what_is_in_flight(
    buffers: list[dict[str, tuple[list[int], int]]],
) -> None:
    """Stages 0 and 2 on the first rank, 1 and 3 on the last: inputs of the micro-batches in flight,
    and a value that has arrived already for what comes next."""
    from autopar.cost.pipeline import actions

    for rank, found in enumerate(buffers):
        most, after = found["interleaved"]
        assert after == 0
        for chunk, seen in enumerate(most):
            live, largest = 0, 0
            for action in actions("interleaved", 2, MICROBATCHES, 2)[rank]:
                if action.chunk == chunk:
                    live += 1 if action.kind == "F" else -1
                    largest = max(largest, live)
            assert seen <= largest + 2
            assert seen >= largest or (rank, chunk) == (0, 0)
