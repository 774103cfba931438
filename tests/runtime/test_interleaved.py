"""Several stages on one rank: what is sent is let go, and parameters are gathered block by block
(values and gradients: test_program.py)."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.mesh import Mesh
from tests.runtime.test_state import make_program
from tests.runtime.toy import make_batch
from tests.warm_ranks import run_on_ranks

OPTIONS: dict[str, Any] = {
    "mesh": Mesh(pp=2, dp=2),
    "schedule": "interleaved",
    "chunks": 2,
    "microbatches": 8,
    "zero": 3,
}


def seen() -> dict[str, Any]:
    """On each rank: outputs under way at most and after a step, and blocks gathered at a time."""
    from torch.distributed.fsdp import FSDPModule

    from autopar.runtime.interleaved import LoopedStage
    from autopar.runtime.torch_compat import fsdp_groups

    program = make_program(OPTIONS)
    stages = program._stage.stages
    assert all(isinstance(s, LoopedStage) and not isinstance(s.submod, FSDPModule) for s in stages)
    most: dict[str, int] = {"outputs": 0, "gathered": 0}
    forward = LoopedStage.forward_one_chunk

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        groups = [g for e in program._engines for g in fsdp_groups(e.stage)]
        result = forward(self, *args, **kwargs)
        most["outputs"] = max(most["outputs"], sum(len(s._outputs_under_way) for s in stages))
        most["gathered"] = max(most["gathered"], sum(g.is_unsharded for g in groups))
        return result

    LoopedStage.forward_one_chunk = watched  # type: ignore[method-assign]
    program.step(make_batch(program.plan.global_batch))
    LoopedStage.forward_one_chunk = forward  # type: ignore[method-assign]
    left = [s._outputs_under_way or s._gradients_under_way for s in stages]
    program.eval().step(make_batch(program.plan.global_batch))
    left += [s._outputs_under_way or s._gradients_under_way for s in stages]
    return {**most, "left": left, "rank": program.ranks.index("pp")}


@pytest.fixture(scope="module")
def by_rank() -> list[dict[str, Any]]:
    return run_on_ranks(seen, 4, timeout_seconds=100)


def test_what_was_sent_is_let_go(by_rank: list[dict[str, Any]]) -> None:
    from autopar.cost.pipeline import actions, in_flight

    for found in by_rank:
        flight = in_flight(actions("interleaved", 2, 8, 2)[found["rank"]])
        # Far from the 16 that torch keeps to the end of the step.
        assert 0 < found["outputs"] <= flight
        assert not any(found["left"])


def test_blocks_are_gathered_one_by_one(by_rank: list[dict[str, Any]]) -> None:
    """After a forward the blocks are sharded again; torch would keep both stages gathered."""
    for found in by_rank:
        assert found["gathered"] == 0
