"""Over how many ranks ZeRO shards, among settings that are alike otherwise: what can be told of all
of them at once.

With more ranks a shard is smaller, and so is all that a rank holds (`Optimizer.shrinks`). Time goes
either way: gathers and reduce-scatters of larger groups take longer, the all-reduce over copies and
the update less. So no number is best everywhere, and all divisors of the replicas are searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autopar.cost.setting import Setting
from autopar.cost.step import block_times
from autopar.search.any_chunks import AnyChunks
from autopar.search.chain import Chain


def families(found: Sequence[Setting]) -> dict[int, tuple[int, ...]]:
    """The settings (by index) that differ in `dp_replicate` alone, by the first of each kind: the
    one that shards over the most ranks, and so needs the least memory. Where an optimizer's state
    does not shrink with its shard each is alone."""
    order = sorted(range(len(found)), key=lambda i: (found[i].mesh.dp_replicate, i))
    kinds: dict[object, list[int]] = {}
    for index in order:
        setting = found[index]
        alike = AnyChunks(replace(setting, mesh=setting.mesh.shape))
        alone = None if setting.update.shrinks else index
        kinds.setdefault((alike, setting.schedule, setting.chunks, alone), []).append(index)
    return {indexes[0]: tuple(indexes) for indexes in kinds.values()}


def undominated(chain: Chain, settings: Sequence[Setting], family: Sequence[int]) -> list[int]:
    """The members of a family that can be best for a priced `chain`.

    With ZeRO-1 sharding shows at the end of a step alone. One that shards over more ranks, and
    whose blocks take no longer there, first in their stage or not, has no longer step for any cuts
    and recomputation, and fits where the other does.
    """
    if settings[family[0]].zero != 1:
        return list(family)
    kept: dict[int, list[tuple[float, float]]] = {}
    for index in family:
        times = [block_times(b, settings[index]) for b in chain.distinct]
        ends = [(t.end_dp + t.end_optimizer, t.end_first) for t in times]
        mine = [(end, end + first) for end, first in ends]
        if not any(_no_longer(other, mine) for other in kept.values()):
            kept[index] = mine
    return list(kept)


def end_gain(chain: Chain, setting: Setting, other: Setting, step_seconds: float) -> float:
    """No plan of at most `step_seconds` ends its step more than so many seconds earlier under
    `other` than under `setting`: two members of a family with ZeRO-1, whose micro-batches take the
    same time.

    A stage is busy for every micro-batch, so all its blocks together take no more than a part of
    the step. What they can gain is most when those that gain the most per second are among them, a
    part of the last one too (the fractional knapsack).
    """
    room = step_seconds / setting.microbatches
    gains, first = [], 0.0
    for block, count in zip(chain.distinct, np.bincount(chain.which), strict=True):
        mine, its = block_times(block, setting), block_times(block, other)
        gain = mine.end_dp + mine.end_optimizer - its.end_dp - its.end_optimizer
        first = max(first, mine.end_first - its.end_first)
        if gain > 0:
            gains.append((mine.kept / gain, gain, int(count)))
    total = first
    for price, gain, count in sorted(gains):
        taken = min(float(count), room / (price * gain)) if price else float(count)
        total += taken * gain
        room -= taken * price * gain
    return total


def _no_longer(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> bool:
    return all(a <= b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))
