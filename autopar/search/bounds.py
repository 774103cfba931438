"""Lower bounds on a configuration without searching its cuts: what lets the outer search skip it.

Time: stages perfectly balanced, nothing recomputed, the shortest possible sends. Memory: everything
that must be somewhere, spread evenly, with every block at its smallest. Both hold for every choice
of cuts and recomputation, and stay valid when the prices themselves are lower bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cost import memory
from autopar.cost.setting import Setting
from autopar.cost.step import block_times
from autopar.search.columns import Chain, Ints


@dataclass(frozen=True)
class Bound:
    """`seconds` of a step and `peak` bytes of the fullest rank: neither can be undercut."""

    seconds: float
    peak: int


def bound(chain: Chain, setting: Setting) -> Bound:
    """The optimistic price of `setting` for a model with these blocks."""
    return Bound(_seconds(chain, setting), _peak(chain, setting))


def _seconds(chain: Chain, setting: Setting) -> float:
    pp, m = setting.mesh.pp, setting.microbatches
    times = [block_times(b, setting) for b in chain.distinct]
    kept = chain.seconds(times, lambda t: t.kept)
    sends = chain.seconds(times, lambda t: t.send)
    first = chain.seconds(times, lambda t: t.first_gather)
    end = chain.seconds(times, lambda t: t.end_dp + t.end_tp + t.end_optimizer)
    end_first = chain.seconds(times, lambda t: t.end_first)
    total = float(kept.sum() + first[0] + (pp - 1) * first.min())
    if pp > 1:
        total += 2 * (pp - 1) * float(sends[:-1].min())
    slowest = max(total / pp, float(kept.max()))
    end_total = float(end.sum() + end_first[0] + (pp - 1) * end_first.min())
    return total + (m - 1) * slowest + max(end_total / pp, float(end.max()))


def _peak(chain: Chain, setting: Setting) -> int:
    pp = setting.mesh.pp
    states = _states_of(chain, setting)
    kept = chain.ints(lambda b: min(b.saved_bytes, b.input_bytes))
    extra = chain.ints(lambda b: b.transient_bytes + memory.bucket_bytes(b, setting)) + chain.ints(
        lambda b: memory.gathered_bytes(b, setting)
    )
    fewest = setting.in_flight(pp - 1)
    alone = states + fewest * kept + extra
    held_by_all = _states_of(chain, setting, tied=True)
    twice = int(held_by_all.sum() - held_by_all.max())
    boundary = chain.ints(lambda b: b.boundary_bytes)
    passing = 0
    if pp > 1:
        # Each boundary passes both sides of itself: held per micro-batch, and once under way.
        passing = 2 * (pp - 1) * (fewest + 1) * int(boundary[:-1].min())
    together = int(states.sum() + fewest * kept.sum() + extra.max()) + passing - twice
    return max(int(alone.max()), together // pp)


def _states_of(chain: Chain, setting: Setting, *, tied: bool = False) -> Ints:
    """Parameters, gradients and optimizer state of every block, or of its tied parameters alone."""
    return chain.ints(
        lambda b: (
            memory.parameter_bytes(b.tied_parameters if tied else b.parameters, setting)
            + memory.gradient_bytes(b.tied_parameters if tied else b.trainable, setting)
            + memory.optimizer_bytes(b.tied_parameters if tied else b.trainable, setting)
        )
    )
