"""Lower bounds on a configuration without searching its cuts: what lets the outer search skip it.

Time: stages perfectly balanced, nothing recomputed, the shortest possible sends. Memory: everything
that must be somewhere, spread evenly, with every block at its smallest. Both hold for every choice
of cuts and recomputation, and stay valid when the prices themselves are lower bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.block_cost import BlockCost
from autopar.cost import memory
from autopar.cost.setting import Setting
from autopar.cost.step import BlockTimes, block_times, dp_collectives, exposed
from autopar.search.columns import Chain, Ints


@dataclass(frozen=True)
class Bound:
    """`seconds` of a step and `peak` bytes of the fullest rank: neither can be undercut."""

    seconds: float
    peak: int


def bound(chain: Chain, setting: Setting, *, sums: bool = False) -> Bound:
    """The optimistic price of `setting` for a model with these blocks.

    `sums`: only the sum of forward and backward is known of a block, not how it divides.
    """
    return Bound(_seconds(chain, setting, sums), _peak(chain, setting))


def _sum_times(block: BlockCost, setting: Setting) -> BlockTimes:
    """Lower bounds of `block_times` over all divisions of the block's seconds.

    What n1 seconds of communication add to h1 seconds of compute is n1 less a share of
    min(n1, h1), so n1 behind h1 and n2 behind h2 add no less than n1 + n2 behind h1 + h2.
    """
    gather, reduce = dp_collectives(block, setting)
    kept = end = 0.0
    if setting.mesh.dp > 1:
        both = gather + reduce
        if setting.zero == 3:
            kept = _exposed(gather, both, block.seconds, setting)
        elif setting.zero == 2:
            kept = _exposed(0.0, reduce, block.seconds, setting)
            end = _exposed(gather, 0.0, block.seconds, setting)
        else:
            end = _exposed(gather if setting.zero else 0.0, reduce, block.seconds, setting)
    known = block_times(block, setting)
    return replace(known, dp_kept=kept, first_gather=0.0, end_dp=end, end_first=0.0)


def _exposed(gathers: float, gradients: float, hiding: float, setting: Setting) -> float:
    """What stays exposed of both kinds of communication together behind `hiding` seconds."""
    practice = setting.practice
    hidden = (gathers if practice.overlap_gathers else 0.0) + (
        gradients if practice.overlap_gradients else 0.0
    )
    return gathers + gradients - hidden + exposed(hidden, hiding)


def _seconds(chain: Chain, setting: Setting, sums: bool) -> float:
    pp, m = setting.mesh.pp, setting.microbatches
    times = [(_sum_times if sums else block_times)(b, setting) for b in chain.distinct]
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
    kept = chain.ints(
        lambda b: memory.held_bytes(b.trainable, min(b.saved_bytes, b.input_bytes), setting)
    )
    extra = chain.ints(
        lambda b: memory.working_bytes(b, setting) + memory.gathered_bytes(b, setting)
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
    """Parameters, gradients and optimizer state of every block, or of its tied parameters alone;
    with one micro-batch gradients are in `memory.held_bytes`."""
    many = setting.microbatches > 1
    return chain.ints(
        lambda b: (
            memory.parameter_bytes(b.tied_parameters if tied else b.parameters, setting)
            + many * memory.gradient_bytes(b.tied_trainable if tied else b.trainable, setting)
            + memory.optimizer_bytes(b.tied_trainable if tied else b.trainable, setting)
        )
    )
