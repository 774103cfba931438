"""What the auxiliary terms of the loss were in the last step, added up as the loss is."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopar.runtime.stage import StageModule

Tensor = torch.Tensor


class LossTerms:
    """Of all stages of this rank; the last stage of a model has them."""

    def __init__(self, stages: Sequence[StageModule]) -> None:
        self._stages = stages
        self.names = list(stages[-1].program.loss_terms.values())
        self._last: Tensor | None = None

    def beside(self, loss: Tensor, weights: Tensor) -> Tensor:
        """The loss of this rank's micro-batches and each term of it, zero where there are none;
        `weights`: of the micro-batches."""
        found = loss.new_zeros(1 + len(self.names))
        found[0] = loss
        for stage in self._stages:
            for index, terms in enumerate(stage.loss_terms):
                for place, term in enumerate(terms, 1):
                    found[place] += weights[index] * term.detach()
            stage.loss_terms = []
        return found

    def keep(self, found: Tensor) -> None:
        """Those of the step, behind its loss."""
        self._last = found[1:]

    def values(self) -> dict[str, float]:
        """Of the last step; none before it."""
        if self._last is None or not self.names:
            return {}
        return dict(zip(self.names, self._last.tolist(), strict=True))
