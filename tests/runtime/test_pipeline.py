"""What a pipelined stage holds while it runs (values and gradients: test_program.py)."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.mesh import Mesh
from tests.runtime.test_state import make_program
from tests.runtime.toy import make_batch
from tests.warm_ranks import run_on_ranks

MICROBATCHES = 6


def held() -> dict[str, tuple[int, int]]:
    """Receive buffers alive at most, and after two steps, by schedule."""
    from autopar.runtime import pipeline

    found = {}
    for schedule in ("gpipe", "1f1b"):
        options: dict[str, Any] = {"mesh": Mesh(pp=2), "schedule": schedule}
        program = make_program({**options, "microbatches": MICROBATCHES})
        stage = program._stage._schedule._stage
        most = 0

        def alive(stage: Any = stage) -> int:
            infos = [*stage.args_recv_info.values(), *stage.grad_recv_info.values()]
            return sum(info.buffer is not None for group in infos for info in group)

        forward = pipeline._Stage.forward_one_chunk

        def watched(
            self: Any, *args: Any, forward: Any = forward, alive: Any = alive, **kwargs: Any
        ) -> Any:
            nonlocal most
            most = max(most, alive())
            return forward(self, *args, **kwargs)

        pipeline._Stage.forward_one_chunk = watched  # type: ignore[method-assign]
        for step in range(2):
            program.step(make_batch(program.plan.global_batch, step))
        pipeline._Stage.forward_one_chunk = forward  # type: ignore[method-assign]
        found[schedule] = (most, alive())
    return found


@pytest.fixture(scope="module")
def buffers() -> list[dict[str, tuple[int, int]]]:
    return run_on_ranks(held, 2, timeout_seconds=60)


def test_buffers_live_from_receipt_to_backward(
    buffers: list[dict[str, tuple[int, int]]],
) -> None:
    first, last = buffers
    # The first stage receives gradients only, each used at once; GPipe's last stage holds every
    # microbatch's input, 1F1B's holds one.
    assert first == {"gpipe": (0, 0), "1f1b": (0, 0)}
    assert last == {"gpipe": (MICROBATCHES, 0), "1f1b": (1, 0)}
