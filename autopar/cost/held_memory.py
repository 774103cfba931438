"""Memory of an interleaved stage, block by block: as if the largest of all terms came at once.

Parameters that several blocks of the stage tie are held once.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.block_cost import BlockCost
from autopar.cost import memory
from autopar.cost.memory import StageMemory
from autopar.cost.setting import Setting


def held_memory(
    blocks: Sequence[BlockCost],
    activations: int,
    passing: int,
    late_gradients: int,
    setting: Setting,
) -> StageMemory:
    """The five terms of a stage with `blocks`. `activations`: bytes of them at their fullest
    moment; `passing`: bytes of the largest input and output that cross the borders of its parts;
    `late_gradients`: those that are there at that moment when there is one micro-batch."""
    seen: dict[str, int] = {}
    parameters = gradients = states = scratch = 0
    for block in blocks:
        parameters += memory.parameter_bytes(block.parameters, setting)
        gradients += memory.gradient_bytes(block.trainable, setting)
        states += memory.optimizer_bytes(block.trainable, setting)
        scratch += memory.scratch_bytes(block.trainable, setting)
        for tied in block.tied:
            if tied.group in seen:
                parameters -= memory.parameter_bytes(tied.parameters, setting)
                gradients -= memory.gradient_bytes(tied.trainable, setting)
                states -= memory.optimizer_bytes(tied.trainable, setting)
                scratch -= memory.scratch_bytes(tied.trainable, setting)
            seen[tied.group] = tied.parameters
    first = second = 0
    for block in blocks:
        size = memory.gathered_bytes(block, setting)
        if size > first:
            first, second = size, first
        else:
            second = max(second, size)
    parameters += first + second + memory.tied_gathered_bytes(sum(seen.values()), setting)
    buffers = (
        max(memory.working_bytes(b, setting) for b in blocks)
        + max((memory.followed_bytes(b, setting) for b in blocks[1:]), default=0)
        + passing
        + setting.practice.bucket_bytes
        + sum(memory.bucket_bytes(b.trainable, setting) for b in blocks)
    )
    end = gradients + scratch
    if setting.microbatches == 1:
        gradients = late_gradients
    return StageMemory(
        parameters, gradients, states, activations, max(buffers, end - gradients - activations)
    )
