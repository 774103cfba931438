"""What makes an impossible request possible, each verified by solving it.

In the order in which a practitioner tries: precision, micro-batch and batch, sequence,
recomputation, schedule, ZeRO, degrees, optimizer, LoRA, offload, more ranks, down to the fewest
nodes that are enough; then all of them at once if no single one is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from autopar.block_cost import CostProvider
from autopar.cluster import Cluster
from autopar.errors import AutoparError
from autopar.plan_document import OF_ELEMENTS
from autopar.search.enumerate import search
from autopar.search.more_ranks import sizes_above, with_ranks
from autopar.search.options import Pins, SearchOptions
from autopar.search.result import Relaxation

# Up to so many times the ranks.
FACTORS = (2, 4, 8, 16, 32, 64)
# Of adapters, as PEFT's own examples have it.
RANK = 16


@dataclass(frozen=True)
class Variant:
    """What of the model is priced: its precision, a sequence so many times `shorter`, and the rank
    of `adapters` that are trained in place of its weights (0: none)."""

    precision: str
    shorter: int = 1
    adapters: int = 0


class ProviderFactory(Protocol):
    """Prices of another variant or on another cluster; None where the program does not allow them.
    Raises `AutoparError` where something is missing to make them."""

    def __call__(self, variant: Variant, cluster: Cluster, /) -> CostProvider | None: ...


@dataclass(frozen=True)
class _Change:
    """A request that differs: `text` says how, `options` and `variant` in what."""

    text: str
    options: SearchOptions
    variant: Variant

    @staticmethod
    def of(text: str, options: SearchOptions, shorter: int = 1, adapters: int = 0) -> _Change:
        return _Change(text, options, Variant(options.precision, shorter, adapters))


def relaxations(
    provider: CostProvider,
    cluster: Cluster,
    options: SearchOptions,
    factory: ProviderFactory | None,
) -> tuple[Relaxation, ...]:
    """Every relaxation that applies here, solved; all free decisions together if none is enough."""
    return tuple(_Attempts(provider, cluster, options, factory).all())


class _Attempts:
    def __init__(
        self,
        provider: CostProvider,
        cluster: Cluster,
        options: SearchOptions,
        factory: ProviderFactory | None,
    ) -> None:
        self.provider, self.cluster = provider, cluster
        self.options, self.factory = options, factory
        self.tried: list[Relaxation] = []

    def all(self) -> list[Relaxation]:
        for change in _changes(self.options, other_prices=self.factory is not None):
            self._try(change, self.cluster)
        if self.factory is not None:
            self._adapters()
        self._offload()
        if self.factory is not None:
            self._more_ranks("{} x the ranks ({})", self.options)
        if self.factory is not None and not any(t.fits for t in self.tried):
            # What none of them does alone they may do together.
            precision, forced = _leaner(self.options.precision), self.options.forced
            together = replace(self.options, precision=precision, pins=forced)
            if self.options.pins != forced:
                text = "all of these pins and precision at once"
                self._try(_Change.of(text, together), self.cluster)
            if not any(t.fits for t in self.tried):
                self._more_ranks("all at once on {1} ranks", together)
        return self.tried

    def _adapters(self) -> None:
        lora = f"LoRA (adapters of rank {RANK} on linear layers, everything else frozen)"
        self._also_leaner(lora, self.options, adapters=RANK)

    def _offload(self) -> None:
        if self.options.optimizer == "adamw" and self.cluster.device.host_bytes_per_second:
            text = "offload (optimizer adamw-host: moments and update in the host's memory)"
            self._also_leaner(text, replace(self.options, optimizer="adamw-host"))

    def _also_leaner(self, text: str, options: SearchOptions, adapters: int = 0) -> None:
        """A change, and in the leaner precision too where it is not enough by itself."""
        if self._try(_Change.of(text, options, adapters=adapters), self.cluster):
            return
        leaner = _leaner(options.precision)
        if leaner != options.precision and self.factory and not self.tried[-1].untried:
            both = replace(options, precision=leaner)
            change = _Change.of(f"{text}, precision {leaner}", both, adapters=adapters)
            self._try(change, self.cluster)

    def _more_ranks(self, text: str, options: SearchOptions) -> None:
        """Twice as many until it fits, then the fewest between that and what did not."""
        too_few, enough = self.cluster.size, 0
        for factor in FACTORS:
            on = with_ranks(self.cluster, factor * self.cluster.size)
            if self._try(_Change.of(text.format(factor, on.size), options), on):
                enough = on.size
                break
            too_few = on.size
        between = [s for s in sizes_above(self.cluster, enough - 1) if s > too_few]
        while between:
            middle = len(between) // 2
            on = with_ranks(self.cluster, between[middle])
            nodes = f"{on.nodes} nodes ({on.size} ranks)" if on.nodes > 1 else f"{on.size} ranks"
            if self._try(_Change.of(nodes, options), on):
                between = between[:middle]
            else:
                between = between[middle + 1 :]

    def _try(self, change: _Change, on: Cluster) -> bool:
        self.tried.append(self._attempt(change, on))
        return self.tried[-1].fits

    def _attempt(self, change: _Change, on: Cluster) -> Relaxation:
        options, factory = change.options, self.factory
        same = on is self.cluster and change.variant == Variant(self.options.precision)
        prices: CostProvider | None = self.provider
        try:
            if factory is not None and not same:
                prices = factory(change.variant, on)
        except AutoparError as error:
            return Relaxation(change.text, False, untried=f"{error}; {error.next_step}")
        try:
            result = search(prices, on, options, explain=False) if prices is not None else None
        except AutoparError:
            return Relaxation(change.text, False)
        if result is None or result.choice is None:
            return Relaxation(change.text, False)
        peak = max(result.choice.peaks)
        described = result.choice.describe()
        return Relaxation(change.text, True, result.step_seconds, peak, described)


def _changes(options: SearchOptions, *, other_prices: bool) -> Iterator[_Change]:
    """Single changes of the request on the same cluster, in the order to try them."""
    pins = options.pins
    leaner = _leaner(options.precision)
    if leaner != options.precision and other_prices:
        yield _Change.of(f"precision {leaner}", replace(options, precision=leaner))

    def free(*names: str) -> Iterator[_Change]:
        names = tuple(n for n in names if getattr(options.forced, n) is None)
        pinned = [n for n in names if getattr(pins, n) is not None]
        if pinned:
            text = ", ".join(str(Pins(**{n: getattr(pins, n)})) for n in pinned)
            yield _Change.of(f"free {text}", replace(options, pins=pins.without(*names)))

    yield from free("microbatch", "microbatches")
    if options.global_batch % 2 == 0:
        half = options.global_batch // 2
        yield _Change.of(f"global batch {half}", replace(options, global_batch=half))
    if other_prices:
        yield _Change.of("half the sequence", options, shorter=2)
    if pins.recompute == "none":
        full = replace(options, pins=replace(pins, recompute="full"))
        yield _Change.of("recompute=full instead of none", full)
    yield from free("recompute")
    yield from free("schedule", "chunks")
    yield from free("zero")
    yield from free("boundary")
    yield from free("cuts")
    yield from free("tp", "pp", "dp", "cp", "cuts")
    for name in _LEANER_OPTIMIZERS.get(options.optimizer, ()):
        if options.spare_experts and name not in OF_ELEMENTS:
            continue  # what is in a slot could not be moved
        yield _Change.of(f"optimizer {name}", replace(options, optimizer=name))


# The nearest to what is asked for first.
_LEANER_OPTIMIZERS = {
    "adamw": ("adamw-8bit", "adafactor", "sgd-momentum", "sgd"),
    "adamw-8bit": ("adafactor", "sgd"),
    "sgd-momentum": ("sgd",),
}


def _leaner(precision: str) -> str:
    return {"fp32": "bf16-mixed", "bf16-mixed": "bf16"}.get(precision, precision)
