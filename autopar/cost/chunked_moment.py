"""The five terms of a rank of an interleaved pipeline at the fullest moment of a step.

A rank holds several chunks of the model, each as one stage is held (`autopar.cost.fullest_moment`).
While one of them runs a backward, the others hold

    their parameters and optimizer states
    what their micro-batches keep, for as many as are alive in them
    their gradients, once they have had a backward in this step

and values that were received early wait at the borders of chunks (`autopar.interleaving`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.block_cost import BlockCost
from autopar.cost.fullest_moment import StageMoments
from autopar.cost.memory import StageMemory
from autopar.cost.setting import Phase, Setting


@dataclass(frozen=True, slots=True)
class ChunkPhase:
    """A backward of chunk number `chunk` of a rank. By chunk: micro-batches that are alive when it
    starts, its own among them, and whether a backward of the step came `before` it. `kind`: `B`, or
    a half, `I` or `W`; then before it came a second half, and `delayed` micro-batches are between
    the halves."""

    chunk: int
    live: tuple[int, ...]
    before: tuple[bool, ...]
    kind: str = "B"
    delayed: tuple[int, ...] = ()

    @property
    def first(self) -> bool:
        return not self.before[self.chunk]


def chunked_memory(
    blocks: Sequence[BlockCost],
    chunks: Sequence[tuple[int, int]],
    labels: Mapping[str, str],
    phases: Iterable[ChunkPhase],
    waiting: int,
    setting: Setting,
) -> StageMemory:
    """Memory of a rank whose chunk i holds `blocks[start:stop]`, with (start, stop) = `chunks[i]`.

    `labels`: how blocks are recomputed, by name. `phases`: the backwards of a step that may be the
    fullest; `waiting`: values that lie received before a chunk.
    """
    again = any(block.name in labels for span in chunks for block in blocks[slice(*span)])
    held = [
        StageMoments.of(blocks, start, stop, labels, setting, again=again) for start, stop in chunks
    ]
    fixed = setting.practice.bucket_bytes
    early = waiting * max(m.received for m in held)
    known: dict[tuple[int, int, bool], StageMemory] = {}
    found = [StageMemory.together([m.end() for m in held])]
    for phase in phases:
        chunk, count = phase.chunk, phase.live[phase.chunk]
        key = (chunk, count, phase.first)
        if key not in known:
            known[key] = held[chunk].at(Phase(count, phase.first))
        others = [
            _meanwhile(held[i], phase.live[i], phase.before[i], setting)
            for i in range(len(held))
            if i != chunk
        ]
        whole = StageMemory.together([known[key], *others])
        found.append(replace(whole, buffers=whole.buffers + early - fixed * len(others)))
    return max(found, key=lambda memory: memory.total)


def _meanwhile(chunk: StageMoments, live: int, before: bool, setting: Setting) -> StageMemory:
    """What a chunk holds while another one works."""
    ready = before or bool(setting.practice.gradient_buffer)
    shared = live * chunk.shared
    return StageMemory(
        chunk.parameters,
        chunk.gradients if ready else 0,
        chunk.optimizer,
        live * chunk.kept - shared,
        chunk.buckets + shared,
    )
