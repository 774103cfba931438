"""torch's schedules run in the order that the cost model prices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from autopar.cost.pipeline import actions
from autopar.interleaving import refused, round_size

KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B"}


@dataclass
class _Stage:
    """All that torch's constructor looks at."""

    stage_index: int
    group_size: int
    num_stages: int
    group_rank: int = 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


def torchs(pp: int, microbatches: int, chunks: int) -> Any:
    stages: Any = [_Stage(c * pp, pp, pp * chunks) for c in range(chunks)]
    return ScheduleInterleaved1F1B(stages, microbatches, loss_fn=lambda output, target: output)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("pp", [2, 3, 4, 5])
def test_interleaved_is_torchs(pp: int, chunks: int) -> None:
    for microbatches in range(1, 17):
        if refused(pp, microbatches):
            with pytest.raises(ValueError, match="multiple of the number of rounds"):
                torchs(pp, microbatches, chunks)
            continue
        schedule = torchs(pp, microbatches, chunks)
        assert schedule.microbatches_per_round == round_size(pp, microbatches)
        priced = actions("interleaved", pp, microbatches, chunks)
        for rank, order in schedule.pipeline_order.items():
            ran = [
                (KINDS[a.computation_type.name], a.microbatch_index, a.stage_index)
                for a in order
                if a is not None
            ]
            assert ran == [(a.kind, a.microbatch, a.chunk * pp + rank) for a in priced[rank]]
