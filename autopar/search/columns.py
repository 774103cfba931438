"""Prices of every interval of blocks as one stage: tables that the cut search reads.

Tables have shape [n, n + 1]: entry [a, b] is the stage that holds blocks a .. b-1. Only what
depends on the stage's position, the number of micro-batches in flight, is left out
(`autopar.search.moment_tables` has it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.block_cost import FULL, BlockCost, tie_groups
from autopar.cost.fullest_moment import kind_of
from autopar.cost.setting import Setting
from autopar.cost.step import BlockTimes, block_times, extra_seconds, tied_seconds
from autopar.search.chain import Chain, Floats, Ints, interval_sum
from autopar.search.moment_tables import MomentTables, moment_tables


@dataclass(frozen=True)
class Way:
    """One way to recompute a block of sort `sort`: the seconds that it adds to a micro-batch, the
    bytes that it frees per micro-batch, and its kind in the tables of memory."""

    sort: int
    label: str
    extra: float
    gain: int
    kind: int


@dataclass(frozen=True)
class Columns:
    """All that the stage search needs to know.

    Per interval: `seconds` of one micro-batch without recomputation, `end` seconds once per step,
    bytes (`memory`), and whether it can be a stage (`legal`: the runtime's pipeline needs a
    parameter on every one, and sends no values without gradient beside others). `kept`, `ended`:
    of `seconds` and `end` what each block adds wherever it is. `which`: of each block its sort;
    `ways`: all ways to recompute a block of a sort.
    """

    seconds: Floats
    kept: Floats
    end: Floats
    ended: Floats
    which: Ints
    ways: tuple[Way, ...]
    memory: MomentTables
    microbatches: int
    legal: NDArray[np.bool_]

    def whole(self, get: Callable[[Way], float]) -> Floats:
        """`get` of every block's way to be recomputed whole, 0 where it has none."""
        of_sort = {way.sort: get(way) for way in self.ways if way.label == FULL}
        return np.array([of_sort.get(int(sort), 0) for sort in self.which], np.float64)

    @property
    def blocks(self) -> int:
        return len(self.which)

    @property
    def sorts(self) -> range:
        return range(int(self.which.max()) + 1)

    @property
    def stages(self) -> int:
        return len(self.memory.phases)


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
    ended = of(lambda t: t.end_dp + t.end_tp + t.end_optimizer)
    end = interval_sum(ended)
    end += of(lambda t: t.end_first)[:, None]
    tables = moment_tables(chain, setting)
    return Columns(
        seconds=seconds,
        kept=of(lambda t: t.kept),
        end=_with_tied_sync(end, chain, setting),
        ended=ended,
        which=chain.which,
        ways=ways_of(chain, setting, tables.kinds),
        memory=tables,
        microbatches=setting.microbatches,
        legal=_legal(chain, setting),
    )


def ways_of(chain: Chain, setting: Setting, kinds: Sequence[tuple[int, int]]) -> tuple[Way, ...]:
    """All ways to recompute the sorts of a chain; `kinds` are those of its tables of memory."""
    number = {kind: index for index, kind in enumerate(kinds)}
    return tuple(
        Way(
            sort,
            option.label,
            extra_seconds(block, option, setting),
            block.saved_bytes - option.kept,
            number[kind_of(block, option)],
        )
        for sort, block in enumerate(chain.distinct)
        for option in block.options
    )


def _legal(chain: Chain, setting: Setting) -> NDArray[np.bool_]:
    n = len(chain)
    some = np.arange(n + 1)[None, :] > np.arange(n)[:, None]
    if setting.mesh.pp == 1:
        return np.asarray(some)
    ends = chain.ints(lambda b: int(b.can_end_stage)) > 0
    ends[-1] = True
    begins = np.concatenate([[True], ends[:-1]])
    some &= begins[:, None] & np.concatenate([[False], ends])[None, :]
    return np.asarray(some & (interval_sum(chain.ints(lambda b: b.parameters)) > 0))


def _with_tied_sync(end: Floats, chain: Chain, setting: Setting) -> Floats:
    """Add the sum over stages of tied gradients where an interval holds some, not all, of them."""
    for group in tie_groups(chain.blocks):
        seconds = tied_seconds(chain.blocks, group, setting)
        holds = chain.tied(group, lambda t: 1 if t.trainable else 0)
        count = interval_sum(holds)
        split = (count > 0) & (count < holds.sum())
        end = np.asarray(end + np.where(split, seconds, 0.0))
    return end
