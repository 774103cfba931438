"""What keeping parameters gathered saves and costs, by block, and the ways to recompute blocks that
are kept or resharded."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autopar.block_cost import FULL
from autopar.cost.setting import Setting
from autopar.cost.step import BlockTimes, block_times
from autopar.search import columns, knapsack
from autopar.search.chain import Chain, Floats, Ints, interval_sum
from autopar.search.columns import Columns, Way
from autopar.search.gathered.moments import ChainMoments, Masks
from autopar.search.stages import PARTIAL, WHOLE

# More sets of kept blocks of one interval are not looked at one by one.
MOST_SETS = 2048


@dataclass(frozen=True)
class Prices:
    """Of a chain under ZeRO-3. `resharded`, `kept`: its columns with every block so.

    Of every block that is kept instead of resharded: `saves` seconds of a micro-batch and
    `ends` seconds more at the end of the step, and `first_saves`, `first_ends` more than that as
    the first of its stage. `fixed`: the blocks that are kept, if that is no choice.
    """

    chain: Chain
    setting: Setting
    recompute: str
    resharded: Columns
    kept: Columns
    saves: Floats
    first_saves: Floats
    ends: Floats
    first_ends: Floats
    moments: ChainMoments
    fixed: frozenset[str] | None

    @staticmethod
    def of(chain: Chain, setting: Setting, recompute: str, fixed: Collection[str] | None) -> Prices:
        resharded, kept = columns.build(chain, setting), columns.build(chain, setting.keeping)
        before = [block_times(b, setting) for b in chain.distinct]
        after = [block_times(b, setting.keeping) for b in chain.distinct]

        def more(get: Callable[[BlockTimes], float]) -> Floats:
            return chain.seconds(before, get) - chain.seconds(after, get)

        return Prices(
            chain,
            setting,
            recompute,
            resharded,
            kept,
            saves=more(lambda t: t.kept),
            first_saves=more(lambda t: t.first_gather),
            ends=-more(lambda t: t.end_dp),
            first_ends=-more(lambda t: t.end_first),
            moments=ChainMoments(chain, setting, resharded.memory),
            fixed=None if fixed is None else frozenset(fixed),
        )

    @property
    def sorts(self) -> int:
        return len(self.chain.distinct)

    @cached_property
    def keepable(self) -> Masks:
        """Blocks that keeping gains anything for; of fixed ones those that are kept."""
        if self.fixed is not None:
            return np.array([b.name in self.fixed for b in self.chain.blocks], bool)
        return (self.saves > 0) & (self.moments.gathered(frozenset()) > 0)

    @cached_property
    def least(self) -> Columns:
        """Columns that no choice of kept blocks undercuts, in bytes or seconds, without what is
        recomputed (all blocks, if that is no choice)."""
        ends, first = np.minimum(0.0, self.ends), np.minimum(0.0, self.first_ends)
        end = self.resharded.end + interval_sum(ends) + first[:, None]
        kept = self.kept.kept
        if self.recompute == FULL:
            kept = kept + self.resharded.whole(lambda way: way.extra)
        ended = self.resharded.ended + ends
        return replace(self.resharded, kept=kept, end=end, ended=ended)

    @cached_property
    def whole(self) -> list[Way]:
        """The ways to recompute all of a block; those of a kept block as in `items`."""
        ways = list(self.resharded.ways)
        ways += [replace(w, sort=w.sort + self.sorts) for w in self.kept.ways]
        return [w for w in ways if w.label == FULL]

    @cached_property
    def items(self) -> knapsack.Items:
        """The ways to recompute a block in question; those of a kept block of sort s belong to sort
        s + `sorts`."""
        ways = list(self.resharded.ways)
        ways += [replace(w, sort=w.sort + self.sorts) for w in self.kept.ways]
        free = [w for w in ways if self.recompute in (WHOLE if w.label == FULL else PARTIAL)]
        return knapsack.items_of(free, self._asks)

    def _asks(self, way: Way) -> Ints:
        """One kind of recomputation never asks for more than another that rebuilds no less and may
        be found in no fewer blocks."""
        rebuilt = self.moments.rebuilt[way.kind : way.kind + 1]
        return np.concatenate([rebuilt, self.moments.can[way.kind].astype(np.int64)])

    def sets(self, start: int, stop: int) -> Masks:
        """The sets of kept blocks of an interval to choose from, fewest first: any number of every
        sort, the last ones, and the first of all or not. Where these are very many, sorts are kept
        one after the other, those first that save the most per byte."""
        keepable, which = self.keepable[start:stop], self.chain.which[start:stop]
        if self.fixed is not None:
            return keepable[None, :]
        rest = keepable.copy()
        rest[0] = False
        first = np.zeros((1 + int(keepable[0]), stop - start), bool)
        first[1:, 0] = True
        held = [np.flatnonzero(rest & (which == s)) for s in dict.fromkeys(which[rest].tolist())]
        many = float(len(first)) * float(np.prod([len(h) + 1.0 for h in held]))
        if many > MOST_SETS:
            gathered = self.moments.gathered(frozenset())[start:stop]
            ratio = self.saves[start:stop] / np.maximum(1, gathered)
            held = [np.concatenate(sorted(held, key=lambda h: float(ratio[h[0]])))]
        found = first
        for places in held:
            some = np.zeros((len(places) + 1, stop - start), bool)
            for count in range(1, len(places) + 1):
                some[count, places[-count:]] = True
            found = (found[:, None, :] | some[None, :, :]).reshape(-1, stop - start)
        return found[np.argsort(found.sum(axis=1), kind="stable")]
