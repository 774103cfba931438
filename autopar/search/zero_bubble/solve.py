"""Cuts of a zero-bubble pipeline: exact over the family of cuts of interleaved 1F1B.

Nothing is recomputed (`autopar.zero_bubble`), so a candidate fits or not. A candidate's time is
what the simulation of its schedule takes, and the longest end of a step. Candidates that fit are
simulated in the order of a lower bound (`times`), many at once, until it reaches the best found.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from autopar.cost.setting import Setting
from autopar.cost.wavefronts import seconds_of_many
from autopar.search.any_chunks import AnyChunks
from autopar.search.chain import Chain
from autopar.search.interleaved.candidates import candidates
from autopar.search.interleaved.least import room
from autopar.search.interleaved.solve import FIRST_BATCH, LARGEST_BATCH, below_target
from autopar.search.interleaved.times import ChunkTimes, chunk_times, forward_seconds, sums
from autopar.search.partition import GAP
from autopar.search.stages import StageSolution
from autopar.search.zero_bubble.memory import DividedMemory, LeastDividedBytes
from autopar.search.zero_bubble.times import PartSeconds, least_seconds

# What `recompute` may say: to recompute all is no such plan.
WITHOUT = ("auto", "none", "selective")


def solve(
    chain: Chain,
    setting: Setting,
    limit: float,
    *,
    recompute: str = "auto",
    starts: Sequence[int] | None = None,
    cutoff: float = np.inf,
) -> StageSolution | None:
    """The best cuts whose ranks all fit in `limit` bytes: as `autopar.search.interleaved.solve`."""
    edges = candidates(chain, setting, starts)
    if not len(edges) or recompute not in WITHOUT:
        return None
    times = chunk_times(chain, AnyChunks(setting))
    parts, ends = PartSeconds.of(chain, setting, times, edges), times.ends(edges, setting)
    bounds = parts.least(setting) + ends
    waiting = np.flatnonzero(bounds < cutoff)
    waiting = waiting[np.argsort(bounds[waiting], kind="stable")]
    peaks = DividedMemory(chain, setting).peaks(edges[waiting])
    fits = peaks.max(axis=1, initial=0) <= limit
    waiting, peaks = waiting[fits], peaks[fits]
    best, winner, begin, size = cutoff, -1, 0, FIRST_BATCH
    while begin < len(waiting) and bounds[waiting[begin]] < best * (1 - GAP):
        some = waiting[begin : begin + size]
        seconds = ends[some] + seconds_of_many(
            parts.forward[some].T,
            parts.backward[some].T,
            setting.microbatches,
            setting.schedule,
            setting.chunks,
            parts.weights[some].T,
        )
        if seconds.min() < best:
            winner = begin + int(seconds.argmin())
            best = float(seconds.min())
        begin, size = begin + size, min(2 * size, LARGEST_BATCH)
    if winner < 0:
        return None
    proven = float(bounds[waiting[begin]]) if begin < len(waiting) else best
    cut = tuple(int(edge) for edge in edges[waiting[winner]])
    empty = [() for _ in pairwise(cut)]
    return StageSolution(
        best,
        min(best, proven),
        cut,
        tuple(empty),
        tuple(peaks[winner].tolist()),
        tuple({} for _ in empty),
    )


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
    none. `seconds`, and all of `chain`, may be lower bounds themselves, unless `exact`; so may the
    bytes of `held`, and the seconds of its forwards. Above `target` a bound need not be the best
    one known."""
    edges = candidates(chain, setting, None)
    if not len(edges):
        return float("inf")
    ends = seconds.ends(edges, setting)
    if exact:
        least = PartSeconds.of(chain, setting, seconds, edges).least(setting) + ends
    else:
        ahead = sums(forward_seconds(held, setting), edges)
        least = least_seconds(ahead, seconds.parts(edges, setting), setting) + ends
    below, best = below_target(least, target)
    if not len(below):
        return best
    schedule = setting.schedule, setting.chunks
    fits = room(LeastDividedBytes, held, AnyChunks(setting), *schedule, limit)(below)
    if exact and len(fits):
        fits = fits[DividedMemory(chain, setting).peaks(edges[fits]).max(axis=1) <= limit]
    return float(least[fits[0]]) if len(fits) else best


def least_peak(
    chain: Chain, setting: Setting, recompute: str, starts: Sequence[int] | None
) -> int | None:
    """The smallest possible bytes of the fullest rank over the family."""
    edges = candidates(chain, setting, starts)
    if not len(edges) or recompute not in WITHOUT:
        return None
    return int(DividedMemory(chain, setting).peaks(edges).max(axis=1).min())
