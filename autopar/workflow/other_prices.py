"""Prices of the same model under another request: what remedies are solved with."""

from __future__ import annotations

from collections.abc import Callable

from autopar.cluster import Cluster
from autopar.program import Program
from autopar.workflow.model_costs import ModelCosts


class OtherPrices:
    """Of `program` as captured, with `sizes`, whose prices in `precision` are `costs`.

    `recapture` gives the program of another precision (None: there is no other), `price` the prices
    of a captured program and its sizes.
    """

    def __init__(
        self,
        program: Program,
        sizes: dict[str, int],
        precision: str,
        costs: ModelCosts,
        recapture: Callable[[str], Program] | None,
        price: Callable[[Program, dict[str, int]], ModelCosts],
    ) -> None:
        self._program, self._sizes, self._precision = program, sizes, precision
        self._recapture, self._price = recapture, price
        self._known: dict[tuple[str, int], ModelCosts] = {(precision, 1): costs}

    def __call__(self, precision: str, cluster: Cluster, /, shorter: int = 1) -> ModelCosts | None:
        """Those on `cluster`; `shorter`: so many times the sequence is shorter. None where the
        program does not allow it."""
        key = precision, shorter
        if key not in self._known:
            program, sizes = self._captured(precision), self._shortened(shorter)
            if program is None or sizes is None:
                return None
            self._known[key] = self._price(program, sizes)
        return self._known[key].on(cluster)

    def _captured(self, precision: str) -> Program | None:
        if precision == self._precision:
            return self._program
        return self._recapture(precision) if self._recapture else None

    def _shortened(self, shorter: int) -> dict[str, int] | None:
        if shorter == 1:
            return self._sizes
        length = self._sizes.get("sequence", 1)
        if "sequence" not in self._program.symbols or length % shorter:
            return None
        return {**self._sizes, "sequence": length // shorter}
