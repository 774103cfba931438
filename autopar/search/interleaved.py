"""Cuts and recomputation of interleaved 1F1B together: exact over the families that are searched.

The families are those of `chunk_cuts` and `chunk_memory`. A candidate's time is what the simulation
of its schedule takes (`autopar.cost.pipeline`), and the longest end of a step. Candidates are taken
in the order of a lower bound (`chunk_times`): first without recomputation, then with what their
memory needs, and are simulated, many at once, while their bound is below the best found. What is
left then can't be better.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.block_cost import tie_groups
from autopar.cost.pipeline import seconds_of_many
from autopar.cost.setting import Setting
from autopar.cost.step import block_times
from autopar.search.any_chunks import AnyChunks
from autopar.search.block_bytes import BlockBytes
from autopar.search.chain import Chain, Floats, Ints
from autopar.search.chunk_cuts import cuts, given, on_one_rank
from autopar.search.chunk_memory import ChunkMemory, Fitted
from autopar.search.chunk_times import ChunkTimes, forward_seconds, least_makespan, sums
from autopar.search.partition import GAP
from autopar.search.stages import StageSolution

# Candidates that are simulated together: few at first, as one may rule out all others.
FIRST_BATCH, LARGEST_BATCH = 4, 256


def candidates(chain: Chain, setting: Setting, starts: Sequence[int] | None) -> Ints:
    """[candidates, parts + 1]: the legal cuts of a setting, with a parameter in every part; given
    `starts`, at most those."""
    pp = setting.mesh.pp
    if starts is not None and len(starts) != pp * setting.chunks:
        return np.zeros((0, pp * setting.chunks + 1), np.int64)
    found = cuts(len(chain), pp, setting.chunks) if starts is None else given(starts, len(chain))
    if len(found):
        found = found[sums(chain.ints(lambda b: b.parameters), found).min(axis=1) > 0]
    for group in tie_groups(chain.blocks):
        if len(found):
            tied = chain.tied(group, lambda t: t.parameters)
            found = found[on_one_rank(found, tied, pp) <= 1]
    return found


def solve(
    chain: Chain,
    setting: Setting,
    limit: float,
    *,
    recompute: str = "auto",
    starts: Sequence[int] | None = None,
    cutoff: float = np.inf,
) -> StageSolution | None:
    """The best cuts and recomputed blocks whose ranks all fit in `limit` bytes.

    `recompute`, `starts`, `cutoff`: as for `autopar.search.stages.solve`. None when nothing fits,
    or nothing is below `cutoff` seconds.
    """
    edges = candidates(chain, setting, starts)
    return _Search(chain, setting, edges, limit, recompute).run(cutoff) if len(edges) else None


@dataclass
class _Fits:
    """A candidate that fits, and its seconds by part."""

    number: int
    fitted: Fitted
    forward: Floats
    backward: Floats


@lru_cache(maxsize=512)
def _bytes(chain: Chain, key: AnyChunks) -> BlockBytes:
    return BlockBytes(chain, key.setting)


class _Search:
    """One inner search over candidate cuts."""

    def __init__(
        self, chain: Chain, setting: Setting, edges: Ints, limit: float, recompute: str
    ) -> None:
        self.setting, self.edges = setting, edges
        self.limit, self.recompute = limit, recompute
        self.pp, self.microbatches = setting.mesh.pp, setting.microbatches
        times = [block_times(b, setting) for b in chain.distinct]
        self.times = ChunkTimes.of(chain, times, setting)
        self.forward = forward_seconds(chain, setting)
        self.memory = ChunkMemory(_bytes(chain, AnyChunks(setting)), setting, self.times.extra)
        self.ends = self.times.ends(edges, self.pp)
        full = recompute == "full"
        parts = self.times.parts(edges, full=full)
        self.bounds = least_makespan(parts, self.pp, self.microbatches) + self.ends

    def _promising(self, cutoff: float) -> list[tuple[float, int]]:
        """(bound, number) of the candidates that may fit and be below `cutoff`, in this order."""
        chosen = np.flatnonzero(self.bounds < cutoff)
        if not len(chosen):
            return []
        chosen = chosen[self.memory.floors(self.edges[chosen]) <= self.limit]
        bounds = self.bounds[chosen]
        if self.recompute == "auto" and len(chosen):
            edges = self.edges[chosen]
            more = self.memory.least_extra(edges, self.limit)
            least = least_makespan(self.times.parts(edges), self.pp, self.microbatches, more)
            bounds = least + self.ends[chosen]
        order = np.argsort(bounds, kind="stable")
        return [(float(bounds[i]), int(chosen[i])) for i in order if bounds[i] < cutoff]

    def run(self, cutoff: float) -> StageSolution | None:
        waiting = self._promising(cutoff)
        ready: list[tuple[float, int, _Fits]] = []
        best, found, proven, taken = cutoff, None, np.inf, 0
        size = FIRST_BATCH
        while True:
            batch: list[_Fits] = []
            while len(batch) < size:
                first = waiting[taken][0] if taken < len(waiting) else np.inf
                second = ready[0][0] if ready else np.inf
                least = min(first, second)
                if least >= best * (1 - GAP):
                    break
                if second <= first:
                    batch.append(heapq.heappop(ready)[2])
                    continue
                taken += 1
                fits = self._fit(waiting[taken - 1][1])
                if fits is not None:
                    heapq.heappush(ready, (self._bound(fits), fits.number, fits))
            if not batch:
                proven = min(least, best)
                break
            seconds = self._simulate(batch)
            winner = int(seconds.argmin())
            if seconds[winner] < best:
                best, found = float(seconds[winner]), batch[winner]
            size = min(2 * size, LARGEST_BATCH)
        return self._solution(found, best, proven) if found is not None else None

    def _fit(self, number: int) -> _Fits | None:
        """The candidate with the recomputation that it needs; None when it can't fit."""
        edges = self.edges[number]
        fitted = self.memory.fit(edges, self.limit, self.recompute)
        if fitted is None:
            return None
        again = np.zeros(len(self.forward))
        chosen = list(fitted.recompute)
        again[chosen] = self.times.extra[chosen]
        start, stop = edges[:-1], edges[1:]
        forward = np.add.reduceat(self.forward, start)
        forward = forward + self.times.first[start] + self.times.exit[stop - 1]
        backward = np.add.reduceat(self.times.kept - self.forward + again, start)
        backward = backward + self.times.entry[start] - self.times.first[start]
        return _Fits(number, fitted, forward, backward)

    def _bound(self, fits: _Fits) -> float:
        parts = (fits.forward + fits.backward)[None]
        least = least_makespan(parts, self.pp, self.microbatches)[0]
        return float(least + self.ends[fits.number])

    def _simulate(self, batch: Sequence[_Fits]) -> Floats:
        """Seconds of a step of each."""
        seconds = seconds_of_many(
            np.stack([f.forward for f in batch], axis=1),
            np.stack([f.backward for f in batch], axis=1),
            self.microbatches,
            "interleaved",
            self.setting.chunks,
        )
        return np.asarray(seconds + self.ends[[f.number for f in batch]])

    def _solution(self, found: _Fits, seconds: float, proven: float) -> StageSolution:
        edges = self.edges[found.number]
        again = tuple(
            tuple(b for b in found.fitted.recompute if start <= b < stop)
            for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        )
        cut = tuple(int(edge) for edge in edges)
        return StageSolution(seconds, min(seconds, proven), cut, again, found.fitted.peaks)


def family_bound(
    chain: Chain,
    setting: Setting,
    seconds: ChunkTimes,
    limit: float,
    target: float,
    *,
    exact: bool,
) -> float:
    """No legal cut of the family that can fit takes less than these seconds; `inf` where there is
    none. `seconds`, and the bytes of `chain`, may be lower bounds themselves, unless `exact`.
    Above `target` a bound need not be the best one known."""
    edges = candidates(chain, setting, None)
    if not len(edges):
        return float("inf")
    pp, m = setting.mesh.pp, setting.microbatches
    ends = seconds.ends(edges, pp)
    parts = seconds.parts(edges)
    least = least_makespan(parts, pp, m) + ends
    below = np.flatnonzero(least < target)
    if len(below):
        memory = ChunkMemory(_bytes(chain, AnyChunks(setting)), setting, seconds.extra)
        least[below[memory.floors(edges[below]) > limit]] = np.inf
        below = np.flatnonzero(least < target)
    if exact and len(below):
        more = memory.least_extra(edges[below], limit)
        least[below] = least_makespan(parts[below], pp, m, more) + ends[below]
    return float(least.min())


def least_peak(
    chain: Chain, setting: Setting, recompute: str, starts: Sequence[int] | None
) -> int | None:
    """The smallest possible bytes of the fullest rank over the families."""
    edges = candidates(chain, setting, starts)
    if not len(edges):
        return None
    blocks = _bytes(chain, AnyChunks(setting))
    extra = chain.seconds([block_times(b, setting) for b in chain.distinct], lambda t: t.extra)
    memory = ChunkMemory(blocks, setting, extra)
    floors = memory.floors(edges)
    best: int | None = None
    for number in np.argsort(floors, kind="stable"):
        if best is not None and floors[number] >= best:
            break
        peak = memory.least(edges[number], recompute)
        best = peak if best is None else min(best, peak)
    return best
