"""What the search knows of prices: the provider's answers, each asked for once and indexed."""

from __future__ import annotations

import time
from collections.abc import Sequence

from autopar.block_cost import (
    Alternative,
    ChainCost,
    CostProvider,
    ExpertProvider,
    SequenceProvider,
)
from autopar.cost.setting import Setting
from autopar.errors import UsageError
from autopar.search.chain import Chain
from autopar.search.recompute_pin import pinned_chain

_Key = tuple[int, int, int, int]


def _key(setting: Setting) -> _Key:
    """What prices depend on: ep, cp, tp and the micro-batch."""
    return setting.mesh.ep, setting.mesh.cp, setting.mesh.tp, setting.microbatch


class Prices:
    """The provider's answers, indexed once, and the time spent waiting for them. `recomputed`:
    names of the blocks that are recomputed, where that is pinned by name."""

    def __init__(self, provider: CostProvider, recomputed: frozenset[str] | None = None) -> None:
        self.provider, self.recomputed = provider, recomputed
        self.seconds = 0.0
        self._alternatives: dict[_Key, Sequence[Alternative]] = {}
        self._sketches: dict[_Key, list[Chain]] = {}
        self._unpinned: dict[tuple[_Key, int], ChainCost] = {}
        self._chains: dict[tuple[_Key, int], tuple[ChainCost, Chain]] = {}
        self._optimistic: dict[_Key, Chain] = {}

    def alternatives(self, setting: Setting, boundary: str | None = None) -> list[int]:
        """Numbers of the alternatives of `setting`'s tp degree and micro-batch: all of them, or
        those with one placement between blocks."""
        found = self._known(setting)
        return [i for i, a in enumerate(found) if boundary in (None, a.boundary)]

    def _known(self, setting: Setting) -> Sequence[Alternative]:
        key = _key(setting)
        if key not in self._alternatives:
            begin = time.perf_counter()
            self._alternatives[key] = self._over(setting).alternatives(*key[2:])
            self.seconds += time.perf_counter() - begin
            like = self.optimistic(setting)
            self._sketches[key] = [Chain(a.least.blocks, like) for a in self._alternatives[key]]
        return self._alternatives[key]

    def boundary_of(self, setting: Setting, number: int) -> str:
        """The placement between blocks of an alternative."""
        return self._known(setting)[number].boundary

    def sketch(self, setting: Setting, number: int) -> Chain:
        """What is known of an alternative without pricing it: see `Alternative.least`."""
        self._known(setting)
        return self._sketches[_key(setting)][number]

    def chain(self, setting: Setting, number: int) -> tuple[ChainCost, Chain]:
        """The full price of an alternative, with what is pinned of its blocks."""
        key = _key(setting), number
        if key not in self._chains:
            cost = pinned_chain(self.unpinned(setting, number), self.recomputed)
            self._chains[key] = cost, Chain(cost.blocks, self.optimistic(setting))
        return self._chains[key]

    def unpinned(self, setting: Setting, number: int) -> ChainCost:
        """The full price of an alternative."""
        key = _key(setting), number
        if key not in self._unpinned:
            alternative = self._known(setting)[number]
            begin = time.perf_counter()
            self._unpinned[key] = alternative.price()
            self.seconds += time.perf_counter() - begin
        return self._unpinned[key]

    def _over(self, setting: Setting) -> CostProvider:
        """The provider of the prices of a part of the sequence, and of the experts."""
        mesh, provider = setting.mesh, self.provider
        if mesh.ep > 1:
            assert isinstance(provider, ExpertProvider)
            return provider.over(mesh.cp, mesh.tp, mesh.ep)
        if mesh.cp == 1:
            return provider
        assert isinstance(provider, SequenceProvider)
        return provider.over(mesh.cp, mesh.tp)

    def check_boundary(self, boundary: str | None) -> None:
        """Raise `UsageError` when no alternative seen has the pinned boundary."""
        seen = sorted({a.boundary for found in self._alternatives.values() for a in found})
        if boundary is not None and seen and boundary not in seen:
            raise UsageError(
                f"boundary={boundary} is not a placement between the blocks of this model",
                next_step=f"choose one of {', '.join(seen)}",
            )

    def known(self, setting: Setting) -> bool:
        """Whether `alternatives` answers at once."""
        return _key(setting) in self._alternatives

    def optimistic(self, setting: Setting) -> Chain:
        """Lower bounds of all alternatives."""
        key = _key(setting)
        if key not in self._optimistic:
            begin = time.perf_counter()
            self._optimistic[key] = Chain(self._over(setting).optimistic(*key[2:]).blocks)
            self.seconds += time.perf_counter() - begin
        return self._optimistic[key]
