"""Memory of a stage, block by block: the evaluator's own way through `autopar.cost.memory`.

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
    seen_tied = False
    parameters = gradients = states = scratch = tied = 0
    for block in blocks:
        own = block.tied_parameters
        repeat = own if seen_tied else 0
        trained = block.tied_trainable if seen_tied else 0
        seen_tied = seen_tied or own > 0
        parameters += memory.parameter_bytes(block.parameters, setting)
        gradients += memory.gradient_bytes(block.trainable, setting)
        states += memory.optimizer_bytes(block.trainable, setting)
        scratch += memory.scratch_bytes(block.trainable, setting)
        if repeat:
            parameters -= memory.parameter_bytes(repeat, setting)
            gradients -= memory.gradient_bytes(trained, setting)
            states -= memory.optimizer_bytes(trained, setting)
            scratch -= memory.scratch_bytes(trained, setting)
        tied = max(tied, own)
    first = second = 0
    for block in blocks:
        size = memory.gathered_bytes(block, setting)
        if size > first:
            first, second = size, first
        else:
            second = max(second, size)
    parameters += first + second + memory.tied_gathered_bytes(tied, setting)
    buffers = (
        max(memory.working_bytes(b, setting) for b in blocks)
        + max((memory.followed_bytes(b, setting) for b in blocks[1:]), default=0)
        + passing
        + setting.practice.bucket_bytes
    )
    end = gradients + scratch
    if setting.microbatches == 1:
        gradients = late_gradients
    return StageMemory(
        parameters, gradients, states, activations, max(buffers, end - gradients - activations)
    )
