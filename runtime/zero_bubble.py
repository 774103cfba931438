"""A stage whose backward is divided in two (`autopar.runtime.divided_backward`), as torch's
zero-bubble schedule asks for it.

The stage without a stage before it has no gradient to pass on: it does its whole backward where the
others do that of their weights. Where a V-shaped pipeline turns, the next stage is on the same rank
and gets what it would receive from hand to hand.
"""

from __future__ import annotations

from typing import Any

import torch

from autopar.runtime.divided_backward import WeightBackward, input_backward
from autopar.runtime.interleaved import LoopedStage
from autopar.runtime.torch_compat import allocate_buffers

Tensor = torch.Tensor


class DividedStage(LoopedStage):
    """One of the stages of this rank."""

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> tuple[tuple[Tensor | None, ...], Any]:
        if backward_type == "full":
            gradients, _ = super().backward_maybe_with_nosync("full", bwd_kwargs, last_backward)
            return gradients, None
        for other in self._other_engines:
            other.release()
        self._engine.before_backward(backward_type == "weight" and last_backward)
        if backward_type == "input":
            return input_backward(
                bwd_kwargs["stage_output"],
                bwd_kwargs["output_grads"],
                bwd_kwargs["input_values"],
                self.submod.parameters(),
            )
        later = bwd_kwargs["param_groups"]
        assert isinstance(later, WeightBackward)
        later.run(self._engine.gradients_arrived)
        self._engine.after_weights(last_backward)
        return (), None

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """What a stage on this rank gets of a backward; torch asks for it in an evaluation too."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()  # type: ignore[no-untyped-call]

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if not self.has_backward:
            return
        # What reached no gradient is sent to another rank as zeros, and handed on here as such.
        infos = zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True)
        allocate_buffers([info for info, given in infos if given is None], self.device)
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        if not self.is_first and bwd_chunk_id in self.backward_state:
            # torch keeps inputs, outputs and their gradients for the second half, which has what
            # it needs of them.
            _, later, *_ = self.backward_state[bwd_chunk_id]
            self.backward_state[bwd_chunk_id] = ((), later, (), None)
