"""One stage's schedule, walked action by action: seconds are booked under what they are spent on,
micro-batches are counted while they live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.block_cost import BlockCost
from autopar.cost.chunked_moment import ChunkPhase
from autopar.cost.pipeline import Action
from autopar.cost.setting import Setting
from autopar.cost.step import (
    PURPOSES,
    dp_collectives,
    exposed_gather,
    exposed_gradients,
    send_seconds,
)
from autopar.errors import PassError
from autopar.plan_document import StagePlan


@dataclass
class Part:
    """One micro-batch through one part: seconds by purpose. `weights`: of a divided backward the
    second half, and then `backward` is the first."""

    forward: dict[str, float]
    backward: dict[str, float]
    weights: dict[str, float]

    def of(self, kind: str) -> dict[str, float]:
        """Of an action."""
        return {"F": self.forward, "W": self.weights}.get(kind, self.backward)


def part_seconds(
    index: int, parts: Sequence[StagePlan], priced: Mapping[str, BlockCost], setting: Setting
) -> Part:
    part = parts[index]
    output = _sent_behind(index, parts, priced, setting)
    received = _sent_behind(index - 1, parts, priced, setting)
    forward = _forward(part, priced, setting)
    backward = _backward(part, priced, setting)
    forward["pp_comm"] += send_seconds(output, setting)
    backward["pp_comm"] += send_seconds(received, setting)
    weights = dict.fromkeys(PURPOSES, 0.0)
    if setting.divided and index == 0:
        # There is none before it to wait for a gradient: it does all in the second half.
        backward, weights = weights, backward
    elif setting.divided:
        own, more = divided_seconds([priced[name] for name in part.blocks], setting)
        backward["compute"] -= own
        weights["compute"] = own + more
    return Part(forward, backward, weights)


def divided_seconds(blocks: Sequence[BlockCost], setting: Setting) -> tuple[float, float]:
    """Of the backward of `blocks` what the second half does of it, and by how much it gets longer
    by being divided, which is done in that half too."""
    more = setting.cluster.device.divided_slowdown * sum(b.backward_compute for b in blocks)
    return sum(b.backward_weights for b in blocks), more


def _sent_behind(
    index: int, parts: Sequence[StagePlan], priced: Mapping[str, BlockCost], setting: Setting
) -> int:
    """Bytes that a part sends to the next one, which may be on the same rank."""
    if not 0 <= index < len(parts) - 1 or index in setting.turns:
        return 0
    return priced[parts[index].blocks[-1]].boundary_bytes


@dataclass
class Walk:
    """One stage's schedule, walked: seconds by purpose over all micro-batches.

    `forward`, `backward`: seconds of one micro-batch through each chunk; `weights`: what a divided
    backward does of it for the weights. `in_flight`: the most that are alive, over all chunks;
    `at_backward`: what is alive when each backward, or half of one, starts.
    """

    spent: dict[str, float]
    forward: list[float]
    backward: list[float]
    weights: list[float]
    in_flight: int
    at_backward: list[ChunkPhase]


def walk(index: int, order: Sequence[Action], chunks: Sequence[Part]) -> Walk:
    """Book every action of the stage's schedule; keep count of what is alive."""
    spent = dict.fromkeys(chunks[0].forward, 0.0)
    live, before, busiest = [0] * len(chunks), [False] * len(chunks), 0
    delayed, left = [0] * len(chunks), Counter(a.chunk for a in order if a.kind == "F")
    at_backward = []
    for action in order:
        kind, chunk = action.kind, action.chunk
        for purpose, seconds in chunks[chunk].of(kind).items():
            spent[purpose] += seconds
        if kind == "F":
            live[chunk] += 1
            busiest = max(busiest, sum(live))
            continue
        done = tuple(not left[i] for i in range(len(chunks)))
        phase = ChunkPhase(chunk, tuple(live), tuple(before), done, kind, tuple(delayed))
        at_backward.append(phase)
        if kind == "I":
            delayed[chunk] += 1
            continue
        delayed[chunk] -= kind == "W"
        live[chunk] -= 1
        left[chunk] -= 1
        before[chunk] = True
    if any(live):
        raise PassError(
            f"stage {index} ends its schedule with {sum(live)} micro-batches alive",
            next_step="every forward needs its backward",
        )
    forward = [sum(p.forward.values()) for p in chunks]
    weights = [sum(p.weights.values()) for p in chunks]
    backward = [sum(p.backward.values()) + w for p, w in zip(chunks, weights, strict=True)]
    return Walk(spent, forward, backward, weights, busiest, at_backward)


def _forward(
    stage: StagePlan, priced: Mapping[str, BlockCost], setting: Setting
) -> dict[str, float]:
    """Seconds of one forward, by purpose."""
    spent = dict.fromkeys(PURPOSES, 0.0)
    for position, name in enumerate(stage.blocks):
        block = priced[name]
        spent["compute"] += block.forward_compute + setting.practice.block_seconds
        spent["tp_comm"] += block.forward_comm - block.forward_cp - block.forward_ep
        spent["ep_comm"] += block.forward_ep
        spent["cp_comm"] += block.forward_cp
        if setting.zero == 3 and name not in stage.keep_gathered:
            gather, _ = dp_collectives(block, setting)
            hidden = block.forward if position else 0.0
            spent["dp_comm"] += exposed_gather(gather, hidden, setting)
    return spent


def _backward(
    stage: StagePlan, priced: Mapping[str, BlockCost], setting: Setting
) -> dict[str, float]:
    """Seconds of one backward, by purpose."""
    ways = stage.recomputed
    spent = dict.fromkeys(PURPOSES, 0.0)
    for name in reversed(stage.blocks):
        block = priced[name]
        available = block.backward
        if name in ways:
            again = block.option(ways[name])
            spent["recompute"] += again.seconds
            available += again.seconds
        spent["compute"] += block.backward_compute
        spent["tp_comm"] += block.backward_comm - block.backward_cp - block.backward_ep
        spent["ep_comm"] += block.backward_ep
        spent["cp_comm"] += block.backward_cp
        if setting.zero >= 2:
            gather, scatter = dp_collectives(block, setting)
            regathers = setting.zero == 3 and name not in stage.keep_gathered
            needed = scatter + (gather if regathers else 0.0)
            spent["dp_comm"] += exposed_gradients(needed, available, setting)
    return spent
