"""Prices of every interval of blocks as one stage: tables that the cut search reads.

Tables have shape [n, n + 1]: entry [a, b] is the stage that holds blocks a .. b-1. Only what
depends on the stage's position, the number of micro-batches in flight, is left out;
`Columns.in_flight` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopar.block_cost import BlockCost
from autopar.cost import memory
from autopar.cost.setting import Setting
from autopar.cost.step import BlockTimes, block_times, tied_seconds

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Number = TypeVar("Number", np.float64, np.int64)


@dataclass(frozen=True)
class Columns:
    """All that the stage search needs to know.

    Per interval: `seconds` of one micro-batch without recomputation, `end` seconds once per step,
    `fixed` bytes, `flight` bytes per micro-batch in flight without recomputation, `scratch` bytes
    of the optimizer step (all that is alive in it). Per block: what recomputation adds in seconds
    (`extra`), what it frees per micro-batch in flight (`gain`), what it rebuilds (`saved`).
    """

    seconds: Floats
    end: Floats
    fixed: Ints
    flight: Ints
    scratch: Ints
    extra: Floats
    gain: Ints
    saved: Ints
    in_flight: tuple[int, ...]
    microbatches: int

    @property
    def blocks(self) -> int:
        return len(self.extra)

    @property
    def stages(self) -> int:
        return len(self.in_flight)


def interval_sum(values: NDArray[Number]) -> NDArray[Number]:
    """[a, b] -> values[a] + ... + values[b - 1]."""
    total = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
    return np.asarray(total[None, :] - total[:-1, None])


def interval_max(values: Ints, *, second: bool = False) -> Ints:
    """[a, b] -> the largest (or second largest, 0 if there is none) of values[a:b]; values >= 0."""
    n = len(values)
    upper = np.where(np.arange(n)[None, :] >= np.arange(n)[:, None], values[None, :], 0)
    largest = np.maximum.accumulate(upper, axis=1)
    if second:
        before = np.zeros_like(largest)
        before[:, 1:] = largest[:, :-1]
        largest = np.maximum.accumulate(np.minimum(before, upper), axis=1)
    table = np.zeros((n, n + 1), np.int64)
    table[:, 1:] = largest
    return table


class Chain:
    """The blocks of a chain with the distinct prices among them, so that each is computed once."""

    def __init__(self, blocks: Sequence[BlockCost]) -> None:
        self.blocks = tuple(blocks)
        names = [f.name for f in fields(BlockCost) if f.name not in ("name", "kind")]
        known: dict[tuple[object, ...], int] = {}
        self.distinct: list[BlockCost] = []
        which = []
        for block in self.blocks:
            key = tuple(getattr(block, name) for name in names)
            if key not in known:
                known[key] = len(self.distinct)
                self.distinct.append(block)
            which.append(known[key])
        self.which = np.array(which, np.int64)

    def __len__(self) -> int:
        return len(self.blocks)

    def ints(self, get: Callable[[BlockCost], int]) -> Ints:
        """`get` of every block, in order."""
        return np.asarray(np.array([get(b) for b in self.distinct], np.int64)[self.which])

    def seconds(self, times: Sequence[BlockTimes], get: Callable[[BlockTimes], float]) -> Floats:
        """`get` of every block's times, in order; `times` are those of `distinct`."""
        return np.asarray(np.array([get(t) for t in times], np.float64)[self.which])


def build(blocks: Chain | Sequence[BlockCost], setting: Setting) -> Columns:
    """Tables of all intervals of `blocks` under `setting`."""
    chain = blocks if isinstance(blocks, Chain) else Chain(blocks)
    times = [block_times(b, setting) for b in chain.distinct]

    def of(get: Callable[[BlockTimes], float]) -> Floats:
        return chain.seconds(times, get)

    send = of(lambda t: t.send)
    sends_out, sends_back = send.copy(), np.concatenate([[0.0], send[:-1]])
    sends_out[-1] = 0.0
    entry = of(lambda t: t.first_gather) + sends_back
    seconds = interval_sum(of(lambda t: t.kept)) + entry[:, None]
    seconds[:, 1:] += sends_out[None, :]
    end = interval_sum(of(lambda t: t.end_dp + t.end_tp + t.end_optimizer))
    end += of(lambda t: t.end_first)[:, None]
    fixed, flight, scratch = _memory(chain, setting)
    saved = chain.ints(lambda b: memory.held_bytes(b.trainable, b.saved_bytes, setting))
    return Columns(
        seconds=seconds,
        end=_with_tied_sync(end, chain, setting),
        fixed=fixed,
        flight=flight,
        scratch=scratch,
        extra=of(lambda t: t.extra),
        gain=saved - chain.ints(lambda b: memory.held_bytes(b.trainable, b.input_bytes, setting)),
        saved=chain.ints(lambda b: memory.rebuilt_bytes(b, setting)),
        in_flight=tuple(setting.in_flight(i) for i in range(setting.mesh.pp)),
        microbatches=setting.microbatches,
    )


def _with_tied_sync(end: Floats, chain: Chain, setting: Setting) -> Floats:
    """Add the sum over stages of tied gradients where an interval holds some, not all, of them."""
    seconds = tied_seconds(chain.blocks, setting)
    if seconds == 0.0:
        return end
    holds = chain.ints(lambda b: 1 if b.tied_trainable else 0)
    count = interval_sum(holds)
    split = (count > 0) & (count < holds.sum())
    return np.asarray(end + np.where(split, seconds, 0.0))


def _memory(chain: Chain, setting: Setting) -> tuple[Ints, Ints, Ints]:
    """`fixed`, `flight` and `scratch` of all intervals, by the model of `autopar.cost.memory`."""
    per_block = chain.ints
    tied = per_block(lambda b: b.tied_parameters)

    def held(term: Callable[[int, Setting], int], *, trained: bool = True) -> Ints:
        once = interval_sum(
            per_block(lambda b: term(b.trainable if trained else b.parameters, setting))
        )
        if not tied.any():
            return np.asarray(once)
        same = per_block(
            lambda b: term(b.tied_trainable if trained else b.tied_parameters, setting)
        )
        return np.asarray(once - (interval_sum(same) - interval_max(same)))

    gathered = per_block(lambda b: memory.gathered_bytes(b, setting))
    resident = (
        held(memory.parameter_bytes, trained=False)
        + held(memory.optimizer_bytes)
        + interval_max(gathered)
        + interval_max(gathered, second=True)
        + interval_max(per_block(lambda b: memory.tied_gathered_bytes(b.tied_parameters, setting)))
    )
    boundary = per_block(lambda b: b.boundary_bytes)
    sent, received = boundary.copy(), np.concatenate([np.zeros(1, np.int64), boundary[:-1]])
    sent[-1] = 0
    buffers = (
        interval_max(per_block(lambda b: memory.working_bytes(b, setting))) + received[:, None]
    )
    buffers[:, 1:] += sent[None, :]
    # All but the first block of a stage have one before them that works while they are reduced.
    buffers[:-1] += interval_max(per_block(lambda b: memory.followed_bytes(b, setting)))[1:]
    flight = interval_sum(
        per_block(lambda b: memory.held_bytes(b.trainable, b.saved_bytes, setting))
    )
    flight += received[:, None]
    flight[:, 1:] += sent[None, :]
    gradients = held(memory.gradient_bytes)
    scratch = resident + gradients + held(memory.scratch_bytes)
    if setting.microbatches > 1:
        resident = resident + gradients
    return np.asarray(resident + buffers), np.asarray(flight), np.asarray(scratch)
