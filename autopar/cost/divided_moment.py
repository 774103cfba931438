"""The five terms of a rank of a zero-bubble pipeline at the fullest moment of a step.

As in `autopar.cost.chunked_moment` a rank holds several chunks, and while one works the others keep
what they have. But a backward is divided, and what a micro-batch keeps in a chunk stays to the end
of the second half. With k micro-batches alive in the working chunk, d of them between the halves,
there are in it

    k x what a micro-batch keeps, d x the gradients that wait for the second half
                less what was saved behind the last weight of the chunk
    first half    gradients that wait so far, gradients of values; nothing is given back
    second half   less what the blocks behind the working one kept and had waiting: they are done;
                  the gradients of one block's weights as they are made; in the first one of a step
                  the gradients that blocks behind have made, later all

What two parts hold of one value at the turn of a V is counted once, until the second one's first
half. Nothing is recomputed, and ZeRO is 0 or 1 (`autopar.zero_bubble`). The first part of the chain
does its whole backward in the second half; there only the gradient of its results waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.block_cost import BlockCost
from autopar.cost.block_moment import casts, end_bytes, made_bytes, sharded, working_in_forward
from autopar.cost.chunked_moment import ChunkPhase, meanwhile
from autopar.cost.fullest_moment import StageMoments
from autopar.cost.memory import StageMemory
from autopar.cost.setting import Phase, Setting


def first_half_bytes(block: BlockCost) -> int:
    """The most that a block works with before the second half, those gradients included that wait
    for it, on top of what it saved."""
    return max(block.divided_transient_bytes, working_in_forward(block))


def given_up_bytes(block: BlockCost, setting: Setting, *, first: bool) -> int:
    """What a second half has less once it is through with a block: what the block kept, but for the
    gradients that the `first` of a step makes."""
    made = made_of_weights(block, setting) if first else 0
    return block.saved_bytes + block.delayed_bytes - made


def made_of_weights(block: BlockCost, setting: Setting) -> int:
    """Gradients that the first second half of a step makes for a block."""
    if casts(setting) and not setting.practice.gradient_buffer:
        return block.trainable * setting.bytes.gradient  # cast one by one, at once
    return made_bytes(block, setting)


def second_half_bytes(block: BlockCost, setting: Setting, *, first: bool) -> int:
    """What there is of a block's gradients while its second half runs, beyond those that were there
    before: FSDP2 takes a block's at once, else each is added at once."""
    if sharded(setting):
        return end_bytes(block, setting, first=first)
    fresh = block.largest_parameter * setting.bytes.compute
    if casts(setting):
        fresh += block.largest_parameter * setting.bytes.gradient
    elif first:
        fresh = 0  # it is the gradient that is kept
    return fresh + (made_of_weights(block, setting) if first else 0)


class _Chunk:
    """A part of the chain; `whole`: it is the first one."""

    def __init__(self, held: StageMoments, whole: bool) -> None:
        self.held, self.whole, self.setting = held, whole, held.setting
        waiting = sum(b.delayed_bytes for b in held.blocks)
        self.delayed = held.sent if whole else waiting
        self.loose = 0 if whole else held.blocks[-1].loose_bytes

    def meanwhile(self, phase: ChunkPhase, index: int) -> StageMemory:
        """While another chunk works; it is chunk number `index` of its rank."""
        found, delayed = meanwhile(self.held, phase, index), phase.delayed[index]
        return replace(
            found,
            activations=found.activations - delayed * self.loose,
            buffers=found.buffers + delayed * self.delayed,
        )

    def at(self, phase: ChunkPhase) -> StageMemory:
        """While it works itself."""
        live, delayed = phase.live[phase.chunk], phase.delayed[phase.chunk]
        if phase.kind == "W" and self.whole:
            found = self.held.at(Phase(live, phase.first))
            more = (delayed - 1) * self.delayed
            return replace(found, buffers=found.buffers + more)
        there = self.meanwhile(phase, phase.chunk)
        more = self._first_half() if phase.kind == "I" else self._second_half(phase.first)
        return replace(there, buffers=there.buffers + more + self.held.received)

    def _first_half(self) -> int:
        if self.whole:
            return 0  # it has none, and a forward is no fuller than its whole backward
        found, waiting, sent = [], 0, 0
        for block in reversed(self.held.blocks):
            found.append(waiting + first_half_bytes(block) + sent)
            waiting, sent = waiting + block.delayed_bytes, self.held.sent
        return max(found)

    def _second_half(self, first: bool) -> int:
        found, done, loose = [], 0, self.loose
        for block in reversed(self.held.blocks):
            found.append(second_half_bytes(block, self.setting, first=first) - done)
            done, loose = done + given_up_bytes(block, self.setting, first=first) - loose, 0
        return max(found)


def divided_memory(
    blocks: Sequence[BlockCost],
    chunks: Sequence[tuple[int, int]],
    labels: Mapping[str, str],
    phases: Iterable[ChunkPhase],
    waiting: int,
    setting: Setting,
) -> StageMemory:
    """As `autopar.cost.chunked_moment.chunked_memory`; `phases`: halves of backwards."""
    held = [
        _Chunk(StageMoments.of(blocks, start, stop, labels, setting), start == 0)
        for start, stop in chunks
    ]
    # Where a V turns, the next part keeps as its input what this one has sent.
    once = held[0].held.sent if len(held) > 1 and chunks[0][1] == chunks[1][0] else 0
    fixed = setting.practice.bucket_bytes * (len(held) - 1)
    early = waiting * max(c.held.received for c in held)
    found = [StageMemory.together([c.held.end() for c in held])]
    for phase in phases:
        whole = StageMemory.together(
            [
                chunk.at(phase) if i == phase.chunk else chunk.meanwhile(phase, i)
                for i, chunk in enumerate(held)
            ]
        )
        kept = whole.activations
        if once:
            kept -= once * (phase.live[1] - phase.delayed[1])
        found.append(replace(whole, activations=kept, buffers=whole.buffers + early - fixed))
    return max(found, key=lambda memory: memory.total)
