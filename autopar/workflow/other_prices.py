"""Prices of the same model under another request: what remedies are solved with."""

from __future__ import annotations

from collections.abc import Callable

from autopar.cluster import Cluster
from autopar.program import Program
from autopar.search.remedies import Variant
from autopar.workflow.model_costs import ModelCosts

Recapture = Callable[[str, int], Program]


class OtherPrices:
    """Of `program` as captured, with `sizes`, whose prices in `precision` are `costs`.

    `recapture` gives the program in another precision, or with adapters of a rank (None: there is
    no other), `price` the prices of a captured program and its sizes.
    """

    def __init__(
        self,
        program: Program,
        sizes: dict[str, int],
        precision: str,
        costs: ModelCosts,
        recapture: Recapture | None,
        price: Callable[[Program, dict[str, int]], ModelCosts],
    ) -> None:
        self._program, self._sizes, self._precision = program, sizes, precision
        self._recapture, self._price = recapture, price
        self._known: dict[Variant, ModelCosts] = {Variant(precision): costs}

    def __call__(self, variant: Variant, cluster: Cluster, /) -> ModelCosts | None:
        """Those of `variant` on `cluster`; None where the program does not allow it."""
        if variant not in self._known:
            program, sizes = self._captured(variant), self._shortened(variant.shorter)
            if program is None or sizes is None:
                return None
            self._known[variant] = self._price(program, sizes)
        return self._known[variant].on(cluster)

    def _captured(self, variant: Variant) -> Program | None:
        if variant.precision == self._precision and not variant.adapters:
            return self._program
        if self._recapture is None:
            return None
        return self._recapture(variant.precision, variant.adapters)

    def _shortened(self, shorter: int) -> dict[str, int] | None:
        if shorter == 1:
            return self._sizes
        length = self._sizes.get("sequence", 1)
        if "sequence" not in self._program.symbols or length % shorter:
            return None
        return {**self._sizes, "sequence": length // shorter}
