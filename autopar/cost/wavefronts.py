"""The simulation of a schedule for many candidates at once: all that can run together is one step.

The order of actions and what they wait for do not depend on seconds. So the actions of all stages
are put into wavefronts once: each stage takes its next action in the first wavefront after that of
its input. Then one numpy operation moves a whole wavefront, for all candidates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopar.cost.pipeline import (
    actions,
    divided_order,
    interleaved_order,
    waits_for_itself,
)
from autopar.interleaving import DIVIDED, parts_of

# Numbers kept at a time when many candidates are simulated together.
LARGEST_TABLE = 4_000_000
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Wavefronts:
    """Actions in the order of their wavefronts, `edges[i]` to `edges[i + 1]` of them in the i-th.
    Of each: its `stage`, the row of its seconds among those of forwards, then backwards (or their
    first halves), then second halves of all parts (`price`), its own number, and that of its input
    (`after`; the number behind the last one: there is none)."""

    edges: tuple[int, ...]
    stage: Ints
    price: Ints
    number: Ints
    after: Ints

    def __iter__(self) -> Iterator[tuple[Ints, Ints, Ints, Ints]]:
        for begin, end in zip(self.edges, self.edges[1:], strict=False):
            some = slice(begin, end)
            yield self.stage[some], self.price[some], self.number[some], self.after[some]


@lru_cache(maxsize=64)
def wavefronts(schedule: str, stages: int, microbatches: int, chunks: int) -> Wavefronts:
    """Those of a schedule; raises `UsageError` when some action waits for what never comes."""
    chunk, microbatch, kind = _orders(schedule, stages, microbatches, chunks)
    parts, length = stages * chunks, chunk.shape[1]
    every = np.arange(stages)
    held = np.array([parts_of(schedule, stage, stages, chunks) for stage in every.tolist()])
    part = held[every[:, None], chunk]
    price = kind * parts + part
    # Forwards come from the part before, backwards from the one behind, or turn at the last one;
    # second halves come from their first ones.
    source = np.choose(kind, [part - 1, parts + part + 1, parts + part])
    source = np.where((kind == 1) & (part == parts - 1), part, source)
    none = stages * length
    number = price * microbatches + microbatch
    after = np.where(source < 0, none, source * microbatches + microbatch)
    done = np.zeros(none + 1, bool)
    done[none] = True
    place, found, edges = np.zeros(stages, np.int64), [], [0]
    while edges[-1] < stages * length:
        left = every[place < length]
        ready = left[done[after[left, place[left]]]]
        if not len(ready):
            raise waits_for_itself(schedule, stages, microbatches, chunks)
        at = place[ready]
        found.append(ready * length + at)
        done[number[ready, at]] = True
        place[ready] += 1
        edges.append(edges[-1] + len(ready))
    order = np.concatenate(found)
    return Wavefronts(
        tuple(edges),
        order // length,
        *(table.ravel()[order] for table in (price, number, after)),
    )


def _orders(schedule: str, stages: int, microbatches: int, chunks: int) -> tuple[Ints, Ints, Ints]:
    """[stages, actions]: chunk and micro-batch of each, and the number of its kind."""
    if schedule in DIVIDED:
        found = [divided_order(schedule, i, stages, microbatches, chunks) for i in range(stages)]
    elif schedule == "interleaved":
        some = [interleaved_order(i, stages, microbatches, chunks) for i in range(stages)]
        found = [(c, i, np.where(forward, 0, 1)) for c, i, forward in some]
    else:
        found = [
            (
                np.array([a.chunk for a in order]),
                np.array([a.microbatch for a in order]),
                np.array([0 if a.kind == "F" else 1 for a in order]),
            )
            for order in actions(schedule, stages, microbatches, chunks)
        ]
    chunk, microbatch, kind = zip(*found, strict=True)
    return np.stack(chunk), np.stack(microbatch), np.stack(kind)


def seconds_of_many(
    forward: Floats,
    backward: Floats,
    microbatches: int,
    schedule: str,
    chunks: int = 1,
    weights: Floats | None = None,
) -> Floats:
    """`pipeline.step_seconds` of many candidates; all tables are [parts, candidates]."""
    if weights is None:
        return _seconds(np.concatenate([forward, backward]), microbatches, schedule, chunks)
    seconds = np.concatenate([forward, backward - weights, weights])
    return _seconds(seconds, microbatches, schedule, chunks)


def _seconds(seconds: Floats, microbatches: int, schedule: str, chunks: int) -> Floats:
    """`seconds`: [kinds x parts, candidates]."""
    kinds = 3 if schedule in DIVIDED else 2
    rows, many = seconds.shape
    numbers, stages = rows * microbatches, rows // kinds // chunks
    if numbers * many > LARGEST_TABLE and many > 1:
        half = many // 2
        left, right = (
            _seconds(seconds[:, some], microbatches, schedule, chunks)
            for some in (slice(None, half), slice(half, None))
        )
        return np.concatenate([left, right])
    ends = np.zeros((numbers + 1, many))
    clock = np.zeros((stages, many))
    for stage, price, number, after in wavefronts(schedule, stages, microbatches, chunks):
        now = np.maximum(clock[stage], ends[after]) + seconds[price]
        ends[number] = clock[stage] = now
    return np.asarray(clock.max(axis=0))
