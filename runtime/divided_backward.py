"""The backward of a stage in two: first the gradients of what it received, which the stage before
waits for, and at any time later those of its weights.

    output gradients ──> gradients of the inputs           + what the weights' gradients are made of
    the latter       ──> gradients of the weights, added up, last layer first

Autograd runs each op's backward for the operands that are asked for only. So the first half stops
at the values of the graph, and the gradients of the results of all ops that read a weight are
caught on their way (`WeightGroup`). The second half starts from these, one group of weights after
the other; what was saved for a layer is given back when its groups are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from autopar.runtime.torch_compat import gradient_edge, made_of, weight_groups

Tensor = torch.Tensor
Arrived = Callable[[Sequence[nn.Parameter]], None]


class WeightGroup:
    """Weights that the same ops read; `gradients[i]` of the results of the i-th of these ops, once
    the backward has passed it."""

    def __init__(self, readers: Sequence[Any], weights: Sequence[nn.Parameter]) -> None:
        self.readers, self.weights = readers, weights
        self.gradients: list[tuple[Tensor | None, ...]] = [()] * len(readers)

    @property
    def precedence(self) -> int:
        """Those of the highest run first."""
        return int(len(self.readers) > 1)

    def catch(self) -> list[Any]:
        """Hooks for the next backward."""

        def hook(index: int) -> Callable[[tuple[Tensor | None, ...]], None]:
            def caught(gradients: tuple[Tensor | None, ...]) -> None:
                self.gradients[index] = gradients

            return caught

        return [reader.register_prehook(hook(i)) for i, reader in enumerate(self.readers)]

    def run(self) -> None:
        """Add to the gradients of the weights."""
        starts = [
            (gradient_edge(reader, i), gradient)
            for reader, gradients in zip(self.readers, self.gradients, strict=True)
            for i, gradient in enumerate(gradients)
            if gradient is not None
        ]
        if not starts:
            return
        several, handles = len(self.readers) > 1, []
        if several:
            # One reader's backward may come by another one, which must count its own gradient only.
            handles = [
                reader.register_prehook(lambda _, own=own: own)
                for reader, own in zip(self.readers, self.gradients, strict=True)
            ]
        try:
            torch.autograd.backward(
                [edge for edge, _ in starts],
                [gradient for _, gradient in starts],
                # It may also come by the readers of other groups.
                retain_graph=several,
                inputs=self.weights,
            )
        finally:
            for handle in handles:
                handle.remove()


class WeightBackward:
    """The second half of one microbatch's backward."""

    def __init__(self, groups: Iterable[WeightGroup]) -> None:
        # From the last layer to the first; but before all others those that come by others' ops.
        self._groups = sorted(groups, key=lambda group: group.precedence)

    def run(self, arrived: Arrived) -> None:
        """`arrived` is called with weights as soon as their gradients are complete."""
        while self._groups:
            group = self._groups.pop()
            group.run()
            arrived(group.weights)


class _Beside(WeightGroup):
    """Outputs that no input goes into: they are made of weights alone, as a bias that a stage
    computes for those after it."""

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        weights: Sequence[nn.Parameter],
        others: Iterable[WeightGroup],
    ) -> None:
        # Those that are read on the way of an input too are complete later.
        later = {id(weight) for group in others for weight in group.weights}
        first = [w for w in weights if id(w) not in later and made_of(outputs, w)]
        super().__init__((), first)
        # Not the outputs: a loss is cut off from its graph after the first half.
        self._pairs = [
            (get_gradient_edge(o), g)
            for o, g in zip(outputs, gradients, strict=True)
            if g is not None
        ]
        self._read = weights

    @property
    def precedence(self) -> int:
        """Before any other gives back what was saved."""
        return 2

    def run(self) -> None:
        edges, gradients = [edge for edge, _ in self._pairs], [g for _, g in self._pairs]
        if edges:
            torch.autograd.backward(  # type: ignore[no-untyped-call, unused-ignore]
                edges, gradients, retain_graph=True, inputs=list(self._read)
            )


class _Whole(WeightGroup):
    """The whole backward, of a stage that received nothing with a gradient."""

    def __init__(
        self,
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None] | None,
        weights: Sequence[nn.Parameter],
    ) -> None:
        super().__init__((), weights)
        self._outputs, self._output_gradients = outputs, gradients

    def run(self) -> None:
        torch.autograd.backward(self._outputs, self._output_gradients)  # type: ignore[no-untyped-call, unused-ignore]


def input_backward(
    outputs: Sequence[Tensor],
    output_gradients: Sequence[Tensor | None] | None,
    inputs: Sequence[Any],
    weights: Iterable[nn.Parameter],
) -> tuple[tuple[Tensor | None, ...], WeightBackward]:
    """The first half: gradients of `inputs` (None for what has none), and the second half.

    `output_gradients`: one for each of the `outputs`; none are needed for a loss.
    """
    given = output_gradients if output_gradients is not None else map(torch.ones_like, outputs)
    pairs = [(o, g) for o, g in zip(outputs, given, strict=True) if o.requires_grad]
    ends, gradients = [o for o, _ in pairs], [g for _, g in pairs]
    trained = [w for w in weights if w.requires_grad]
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    if not wanted or not ends:
        whole = [_Whole(ends, gradients, trained)] if ends else []
        return (None,) * len(inputs), WeightBackward(whole)
    read, made = weight_groups(ends, wanted, trained)
    groups = [WeightGroup(*found) for found in read]
    beside = [i for i, of_inputs in enumerate(made) if not of_inputs]
    handles = [handle for group in groups for handle in group.catch()]
    try:
        found = torch.autograd.grad(ends, wanted, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    if beside:
        some = [ends[i] for i in beside], [gradients[i] for i in beside]
        groups.append(_Beside(*some, trained, groups))
    # As they are sent; added to an input's own gradient they would have its layout.
    sent = [None if gradient is None else gradient.contiguous() for gradient in found]
    by_input = {id(x): gradient for x, gradient in zip(wanted, sent, strict=True)}
    return tuple(by_input.get(id(x)) for x in inputs), WeightBackward(groups)
