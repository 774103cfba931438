"""The five terms of a rank of an interleaved pipeline at the fullest moment of a step.

A rank holds several chunks of the model, each as one stage is held (`autopar.cost.fullest_moment`).
While one of them runs a backward, the others hold

    their parameters and optimizer states
    what their micro-batches keep, for as many as are alive in them
    their gradients, once they have had a backward in this step; after their last one FSDP2 has
        reduced them to shards (ZeRO-1) and given back what it gathered (ZeRO-1 and 2)

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
    starts, its own among them, whether a backward of the step came `before` it, and whether all
    of them did (`done`). `kind`: `B`, or a half, `I` or `W`; then before it came a second half, and
    `delayed` micro-batches are between the halves."""

    chunk: int
    live: tuple[int, ...]
    before: tuple[bool, ...]
    done: tuple[bool, ...]
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
        others = [meanwhile(held[i], phase, i) for i in range(len(held)) if i != chunk]
        whole = StageMemory.together([known[key], *others])
        found.append(replace(whole, buffers=whole.buffers + early - fixed * len(others)))
    return max(found, key=lambda memory: memory.total)


def meanwhile(chunk: StageMoments, phase: ChunkPhase, index: int) -> StageMemory:
    """What chunk number `index` of a rank holds while another one works."""
    ready = phase.before[index] or bool(chunk.setting.practice.gradient_buffer)
    parameters, gradients = chunk.parameters, chunk.gradients if ready else 0
    if phase.done[index]:
        parameters -= chunk.given_back[0]
        gradients -= chunk.given_back[1]
    live = phase.live[index]
    shared = live * chunk.shared
    return StageMemory(
        parameters,
        gradients,
        chunk.optimizer,
        live * chunk.kept - shared,
        chunk.buckets + shared,
    )
