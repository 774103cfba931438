"""Cuts and recomputation of interleaved 1F1B together: exact over the families that are searched.

The families are those of `candidates` and `recomputation`. A candidate's time is what the
simulation of its schedule takes (`autopar.cost.pipeline`), and the longest end of a step.
Candidates are taken in the order of a lower bound (`times`): first without recomputation, then with
what their memory needs, and are simulated, many at once, while their bound is below the best found.
What is left then can't be better.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopar.block_cost import FULL
from autopar.cost.setting import Setting
from autopar.cost.wavefronts import seconds_of_many
from autopar.search.any_chunks import AnyChunks
from autopar.search.chain import Chain, Floats, Ints
from autopar.search.interleaved.candidates import candidates
from autopar.search.interleaved.least import LeastBytes, room
from autopar.search.interleaved.memory import ChunkMemory
from autopar.search.interleaved.times import (
    ChunkTimes,
    chunk_times,
    forward_seconds,
    least_busy,
    least_makespan,
    sums,
)
from autopar.search.partition import GAP
from autopar.search.stages import StageSolution

# Candidates that are simulated, and fitted, together: few at first, as one may rule out all others.
FIRST_BATCH, LARGEST_BATCH = 4, 256
FIRST_FITTED, LARGEST_FITTED = 16, 1024


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


@dataclass(frozen=True)
class _Fits:
    """A candidate that fits, with what its recomputation takes, and its seconds by part."""

    number: int
    bound: float
    peaks: tuple[int, ...]
    steps: Ints
    more: Ints
    forward: Floats
    backward: Floats


class _Search:
    """One inner search over candidate cuts."""

    def __init__(
        self, chain: Chain, setting: Setting, edges: Ints, limit: float, recompute: str
    ) -> None:
        self.setting, self.edges = setting, edges
        self.limit, self.recompute = limit, recompute
        self.pp, self.microbatches = setting.mesh.pp, setting.microbatches
        self.times = chunk_times(chain, AnyChunks(setting))
        self.forward = forward_seconds(chain, setting)
        self.memory = ChunkMemory(chain, setting, recompute)
        self.ends = self.times.ends(edges, setting)
        parts = self.times.parts(edges, setting, full=recompute == "full")
        self.bounds = least_makespan(parts, setting) + self.ends

    def _promising(self, cutoff: float) -> list[tuple[float, int]]:
        """(bound, number) of the candidates that may fit and be below `cutoff`, in this order."""
        chosen = np.flatnonzero(self.bounds < cutoff)
        if not len(chosen):
            return []
        edges = self.edges[chosen]
        if self.recompute == "full":
            fits = self.memory.floors(edges) <= self.limit
            chosen, bounds = chosen[fits], self.bounds[chosen[fits]]
        else:
            parts, ends = self.times.parts(edges, self.setting), self.ends[chosen]
            busy = least_busy(parts, self.setting) + ends[:, None]
            known = self.bounds[chosen], busy, cutoff
            bounds = self.memory.with_recomputation(edges, self.limit, *known)
        order = np.argsort(bounds, kind="stable")
        return [(float(bounds[i]), int(chosen[i])) for i in order if bounds[i] < cutoff]

    def run(self, cutoff: float) -> StageSolution | None:
        waiting = self._promising(cutoff)
        ready: list[tuple[float, int, _Fits]] = []
        best, found, proven, taken = cutoff, None, np.inf, 0
        size, fitted = FIRST_BATCH, FIRST_FITTED
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
                for fits in self._fit([number for _, number in waiting[taken : taken + fitted]]):
                    heapq.heappush(ready, (fits.bound, fits.number, fits))
                taken += fitted
                fitted = min(2 * fitted, LARGEST_FITTED)
            if not batch:
                proven = min(least, best)
                break
            seconds = self._simulate(batch)
            winner = int(seconds.argmin())
            if seconds[winner] < best:
                best, found = float(seconds[winner]), batch[winner]
            size = min(2 * size, LARGEST_BATCH)
        return self._solution(found, best, proven) if found is not None else None

    def _fit(self, numbers: Sequence[int]) -> list[_Fits]:
        """Those candidates that can fit, with the recomputation that they need."""
        asked = np.array(numbers)
        fitted = self.memory.fit(self.edges[asked], self.limit)
        numbers = asked[fitted.where].tolist()
        edges = self.edges[numbers]
        start = edges[:, :-1]
        forward = sums(self.forward, edges) + self.times.first[start]
        forward = forward + self.times.leaving(edges, self.setting)
        backward = sums(self.times.kept - self.forward, edges) + fitted.extra
        backward = backward + self.times.entering(edges, self.setting) - self.times.first[start]
        least = least_makespan(forward + backward, self.setting)
        bounds = (least + self.ends[numbers]).tolist()
        return [
            _Fits(
                number,
                bounds[i],
                tuple(fitted.peaks[i].tolist()),
                fitted.steps[i],
                fitted.more[i],
                forward[i],
                backward[i],
            )
            for i, number in enumerate(numbers)
        ]

    def _simulate(self, batch: Sequence[_Fits]) -> Floats:
        """Seconds of a step of each."""
        seconds = seconds_of_many(
            np.stack([f.forward for f in batch], axis=1),
            np.stack([f.backward for f in batch], axis=1),
            self.microbatches,
            self.setting.schedule,
            self.setting.chunks,
        )
        return np.asarray(seconds + self.ends[[f.number for f in batch]])

    def _solution(self, found: _Fits, seconds: float, proven: float) -> StageSolution:
        edges = self.edges[found.number]
        labels = self.memory.labels(edges, found.steps, found.more)
        cut = tuple(int(edge) for edge in edges)
        spans = list(pairwise(cut))
        whole = {block for block, label in labels.items() if label == FULL}
        return StageSolution(
            seconds,
            min(seconds, proven),
            cut,
            tuple(tuple(b for b in range(*span) if b in whole) for span in spans),
            found.peaks,
            tuple(
                {b: labels[b] for b in range(*span) if b in labels and b not in whole}
                for span in spans
            ),
        )


def below_target(least: Floats, target: float) -> tuple[Ints, float]:
    """The candidates that take `least` seconds below `target`, shortest first; and the least of the
    others, `inf` where there are none."""
    order = np.argsort(least, kind="stable")
    below, above = np.split(order, [int(np.count_nonzero(least < target))])
    return below, float(least[above[0]]) if len(above) else float("inf")


def family_bound(
    chain: Chain,
    held: Chain,
    setting: Setting,
    seconds: ChunkTimes,
    limit: float,
    target: float,
    *,
    exact: bool,
) -> float:
    """No legal cut of the family that can fit takes less than these seconds; `inf` where there is
    none. `seconds`, and the bytes of `held`, may be lower bounds themselves, unless `exact`.
    Above `target` a bound need not be the best one known."""
    edges = candidates(chain, setting, None)
    if not len(edges):
        return float("inf")
    ends = seconds.ends(edges, setting)
    parts = seconds.parts(edges, setting)
    least = least_makespan(parts, setting) + ends
    below, best = below_target(least, target)
    if not len(below):
        return best
    may_fit = room(LeastBytes, held, AnyChunks(setting), setting.schedule, setting.chunks, limit)
    memory: ChunkMemory | None = None
    begin, size = 0, FIRST_FITTED
    while begin < len(below) and least[below[begin]] < best:
        some = below[begin : begin + size]
        begin, size = begin + size, min(2 * size, LARGEST_FITTED)
        some = may_fit(some)
        if exact and len(some):
            memory = memory or ChunkMemory(chain, setting, "auto")
            busy = least_busy(parts[some], setting) + ends[some, None]
            known = least[some], busy, min(target, best)
            least[some] = memory.with_recomputation(edges[some], limit, *known)
        best = min(best, float(least[some].min(initial=np.inf)))
    return best


def least_peak(
    chain: Chain, setting: Setting, recompute: str, starts: Sequence[int] | None
) -> int | None:
    """The smallest possible bytes of the fullest rank over the families."""
    edges = candidates(chain, setting, starts)
    if not len(edges):
        return None
    memory = ChunkMemory(chain, setting, recompute)
    floors = memory.floors(edges)
    order = np.argsort(floors, kind="stable")
    best: int | None = None
    for begin in range(0, len(order), LARGEST_BATCH):
        some = order[begin : begin + LARGEST_BATCH]
        if best is not None and floors[some[0]] >= best:
            break
        peak = int(memory.least(edges[some]).min())
        best = peak if best is None else min(best, peak)
    return best
