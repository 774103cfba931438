"""When gradients and parameters travel at each ZeRO level, alone and under a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.mesh import Mesh
from tests.runtime.test_state import make_program
from tests.runtime.toy import make_batch
from tests.warm_ranks import run_on_ranks

MICROBATCHES = 3


def count_messages() -> dict[str, dict[str, int]]:
    """FSDP's messages in one step by kind, and whether parameters were dropped in between."""
    from unittest import mock

    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

    found = {}
    for pp in (1, 2):
        for zero in (0, 1, 2, 3):
            mesh = Mesh(pp=pp, dp=4 // pp)
            program = make_program({"mesh": mesh, "zero": zero, "microbatches": MICROBATCHES})
            batch = make_batch(program.plan.global_batch)
            program.step(batch)
            with (
                mock.patch.object(fsdp, "foreach_reduce", wraps=fsdp.foreach_reduce) as reduce,
                mock.patch.object(
                    fsdp, "foreach_all_gather", wraps=fsdp.foreach_all_gather
                ) as gather,
            ):
                program.step(batch)
            blocks = len(program._programs[0].blocks)
            found[f"pp{pp} zero{zero}"] = {
                "reduce": reduce.call_count / blocks,
                "gather": gather.call_count / blocks,
            }
    return found


@pytest.fixture(scope="module")
def messages() -> list[dict[str, Any]]:
    return run_on_ranks(count_messages, 4, timeout_seconds=120)


@pytest.mark.parametrize("pp", [1, 2])
def test_messages_per_block(messages: list[dict[str, Any]], pp: int) -> None:
    for found in messages:
        assert found[f"pp{pp} zero0"] == {"reduce": 0, "gather": 0}
        assert found[f"pp{pp} zero1"] == {"reduce": 1, "gather": 1}
        assert found[f"pp{pp} zero2"] == {"reduce": MICROBATCHES, "gather": 1}
        assert found[f"pp{pp} zero3"]["reduce"] == MICROBATCHES
        # Forward and backward of each microbatch.
        assert found[f"pp{pp} zero3"]["gather"] == 2 * MICROBATCHES
