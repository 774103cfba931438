"""The price of one block on one rank for one micro-batch: what the search adds up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds and bytes of one block, for one (tp degree, micro-batch size, boundary placement).

    Seconds are per micro-batch; `*_compute` excludes, `*_comm` is the exposed tensor-parallel
    communication. `backward_weights`: the part of `backward_compute` for gradients of weights,
    which a schedule can delay. Full recomputation repeats the forward (compute and communication)
    in the backward. `parameters`: number of parameter elements that this tp rank holds (trainable
    ones in `trainable`). `saved_bytes`: tensors kept for the backward without recomputation, per
    micro-batch; `input_bytes`: what is kept with full recomputation (the block's inputs).
    `transient_bytes`: the largest extra bytes alive at one moment inside the block's forward or
    backward, with the gradient of one parameter; `reduced_transient_bytes`: the same with the
    gradients of all the block's parameters so far. `largest_parameter`: elements of the largest
    trainable one. `boundary_bytes`: the values that pass from this block to the next, as one rank
    holds them. `parameter_reduce_seconds`: end-of-step sum over tp of gradients of `R*` parameters.
    `tied_parameters`: how many of `parameters` other blocks of the chain hold too (as an output
    head that shares the embedding's weight does), the trainable ones of them in `tied_trainable`;
    all blocks that hold some share the same ones.
    """

    name: str
    kind: str
    forward_compute: float
    backward_compute: float
    forward_comm: float
    backward_comm: float
    flops: float
    parameters: int
    trainable: int
    saved_bytes: int
    input_bytes: int
    transient_bytes: int
    boundary_bytes: int
    parameter_reduce_seconds: float = 0.0
    tied_parameters: int = 0
    tied_trainable: int = 0
    backward_weights: float = 0.0
    reduced_transient_bytes: int = 0
    largest_parameter: int = 0

    @property
    def forward(self) -> float:
        return self.forward_compute + self.forward_comm

    @property
    def backward(self) -> float:
        return self.backward_compute + self.backward_comm

    @property
    def seconds(self) -> float:
        """Forward and backward without recomputation."""
        return self.forward + self.backward


@dataclass(frozen=True)
class ChainCost:
    """The prices of all blocks of a model, in order, under one choice of placements.

    `boundary`: placement of the values that pass from block to block (for example `R` or `S(1)`);
    `label` tells alternatives apart for a reader; `placements[block][op]` as in `Plan.placements`.
    """

    boundary: str
    label: str
    blocks: tuple[BlockCost, ...]
    placements: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Alternative:
    """A choice of placements before its full price is known.

    `least`: bytes and times that its price can't undercut; the seconds of a block are exact, but
    only as the sum of forward and backward. `price` answers with the full price; it may take long.
    """

    boundary: str
    least: ChainCost
    price: Callable[[], ChainCost]


class CostProvider(Protocol):
    """What the search asks a model; answers are computed on demand and kept by the provider."""

    block_names: tuple[str, ...]

    def tp_degrees(self, limit: int) -> list[int]:
        """Legal tensor-parallel degrees up to `limit`."""

    def microbatch_sizes(self, most: int) -> list[int]:
        """Micro-batch sizes up to `most` that the captured program allows."""

    def alternatives(self, tp: int, microbatch: int) -> Sequence[Alternative]:
        """The choices of placements to choose from."""

    def optimistic(self, tp: int, microbatch: int) -> ChainCost:
        """Cheap lower bounds of every time and byte of every alternative."""
