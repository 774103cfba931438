"""Several stages of the pipeline on one rank: what torch's interleaved schedule needs of a stage.

torch's schedule gathers all parameters of a stage that is an FSDP2 module at once, and keeps every
tensor that was sent to the end of the step. Here a stage gathers block by block, as it does alone,
and what was sent is let go when it has arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from autopar.runtime.pipeline_stage import PlannedStage
from autopar.runtime.torch_compat import batch_p2p
from autopar.runtime.zero import DataParallel

Tensor = torch.Tensor


class _Hidden(nn.Module):
    """The stage's module, of which torch does not see that it is FSDP2's."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *received: Tensor, **batch: Tensor) -> Any:
        return self.stage(*received, **batch)


class LoopedStage(PlannedStage):
    """One of the stages of this rank; `others` are the engines of the rank's other stages."""

    def __init__(
        self, engine: DataParallel, others: Sequence[DataParallel], *place: Any, **options: Any
    ) -> None:
        super().__init__(engine, *place, module=_Hidden(engine.stage), **options)
        self._other_engines = others
        self._outputs_under_way: dict[int, list[Any]] = {}
        self._gradients_under_way: list[Any] = []

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        # What the last reduction read is held to the next backward of its stage, behind forwards
        # of all of them.
        for other in self._other_engines:
            other.release()
        return super().forward_maybe_with_nosync(*args, **kwargs)

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        # What the last reduction read is held to the next backward, which is another stage's.
        for other in self._other_engines:
            other.release()
        return super().backward_maybe_with_nosync(*args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[Any]:
        sends = batch_p2p(super().get_fwd_send_ops(fwd_chunk_id))
        self._outputs_under_way[fwd_chunk_id] = sends
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[Any]:
        """One gradient is under way at a time; the receiver waits for it already."""
        _wait(self._gradients_under_way)
        self._gradients_under_way = batch_p2p(super().get_bwd_send_ops(bwd_chunk_id))
        return []

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        # Its gradient has come back, so the output has arrived.
        _wait(self._outputs_under_way.pop(bwd_chunk_id, []))
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def finish_sends(self) -> None:
        """Everything sent in this step has arrived."""
        for sends in (*self._outputs_under_way.values(), self._gradients_under_way):
            _wait(sends)
        self._outputs_under_way = {}
        self._gradients_under_way = []


def _wait(sends: list[Any]) -> None:
    for send in sends:
        send.wait()
