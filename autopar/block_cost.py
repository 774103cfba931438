"""The price of one block on one rank for one micro-batch: what the search adds up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

# The label of recomputing a block whole, beside those of its sets of ops.
FULL = "full"


@dataclass(frozen=True, slots=True)
class PartialRecompute:
    """A set of ops of a block that can run again in its backward: `ops` by the names of a plan
    (none are named for the whole block).

    Seconds of these ops (compute, and communication over tp); bytes kept per micro-batch from
    forward to backward (as `BlockCost.saved_bytes` without it), and bytes that the ops make again
    in the backward.
    """

    label: str
    ops: tuple[str, ...]
    compute: float
    comm: float
    kept: int
    rebuilt: int

    @property
    def seconds(self) -> float:
        return self.compute + self.comm


@dataclass(frozen=True, slots=True)
class Experts:
    """Of a block's parameters, those of experts that ep splits: elements on one rank of ep and tp,
    the trainable ones among them, and the shapes of these. `spare`: of the trainable ones, those of
    spare slots."""

    parameters: int = 0
    trainable: int = 0
    shapes: tuple[tuple[int, ...], ...] = ()
    spare: int = 0


@dataclass(frozen=True, slots=True)
class Tied:
    """Parameters that the same blocks of a chain hold (an embedding and a head, say): elements on
    one tp rank, and the trainable ones among them. `group`: a name that these blocks share;
    `shapes`: of the trainable ones; `last`: no later block of the chain holds them."""

    group: str
    parameters: int
    trainable: int
    shapes: tuple[tuple[int, ...], ...] = ()
    last: bool = True

    @property
    def experts(self) -> Experts:
        """None: experts that several blocks hold are not split."""
        return Experts()


@dataclass(frozen=True, slots=True)
class BlockCost:
    """Seconds and bytes of one block, for one (tp degree, micro-batch size, boundary placement).

    Seconds are per micro-batch; `*_compute` excludes, `*_comm` is the exposed communication of
    tensor and context parallelism. `backward_weights`: the part of `backward_compute` for gradients
    of weights, which a schedule can delay. Full recomputation repeats the forward (compute and
    communication) in the backward. `parameters`: number of parameter elements that this tp rank
    holds (trainable ones in `trainable`). `saved_bytes`: tensors kept for the backward without
    recomputation, per micro-batch; `input_bytes`: what is kept with full recomputation (the block's
    inputs). `transient_bytes`: the largest extra bytes alive at one moment inside the block's
    forward or backward, with the gradient of one parameter; `reduced_transient_bytes`: the same
    with the gradients of all the block's parameters so far, `reduced_gradient_bytes` of it.
    `largest_parameter`, `last_parameter`: elements of the largest trainable one, and of the last
    that no other block holds. `saved_input_bytes`: the part of `saved_bytes` that are the block's
    inputs; `released_bytes`: the part that is gone at the fullest moment of the backward.
    `forward_transient_bytes`: `transient_bytes` of the forward alone; `fleeting_bytes`: the most in
    a forward that keeps its inputs alone, beside these. `shared_bytes`: values made
    once per micro-batch and stage that the block reads (part of the transient ones);
    `shared_kept_bytes`: those of them that its backward keeps, if it is not recomputed;
    `shared_key`: the same for blocks that read the same ones, empty if no other block does.
    `delayed_bytes`: gradients that a divided backward keeps from its first half, which makes those
    of values, to its second, which makes those of weights; `divided_transient_bytes`: the largest
    extra bytes in the first half, these included; `loose_bytes`: the part of `saved_bytes` that is
    not kept to the second half where the block is the last of its stage. `boundary_bytes`: the
    values that pass from this block to the next, as one rank holds them.
    `parameter_reduce_seconds`: end-of-step sum over tp of gradients of `R*` parameters. `tied`:
    those of `parameters` that other blocks of the chain hold too, by the blocks that do. `partial`:
    the sets of ops that the search may have run again, from fewer bytes freed to more. `*_cp`: the
    part of `*_comm` between ranks that split the sequence, `*_ep` between replicas that split
    experts; `hidden_ep`: seconds of these, forward and backward, that compute hides, so that they
    are in none of the others. `experts`: those of `parameters` that ep splits; `spare_over_tp`:
    trainable elements of spare slots of experts that tp splits. `shapes`: of the
    trainable parameters on this tp rank; none where they are not known, as in a bound.
    `recomputed`: whether the block is recomputed, whole, where that is no choice.
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
    tied: tuple[Tied, ...] = ()
    backward_weights: float = 0.0
    reduced_transient_bytes: int = 0
    reduced_gradient_bytes: int = 0
    largest_parameter: int = 0
    last_parameter: int = 0
    saved_input_bytes: int = 0
    released_bytes: int = 0
    forward_transient_bytes: int = 0
    fleeting_bytes: int = 0
    shared_bytes: int = 0
    shared_kept_bytes: int = 0
    shared_key: str = ""
    delayed_bytes: int = 0
    divided_transient_bytes: int = 0
    loose_bytes: int = 0
    partial: tuple[PartialRecompute, ...] = ()
    forward_cp: float = 0.0
    backward_cp: float = 0.0
    can_end_stage: bool = True
    shapes: tuple[tuple[int, ...], ...] = ()
    forward_ep: float = 0.0
    backward_ep: float = 0.0
    hidden_ep: float = 0.0
    experts: Experts = Experts()
    spare_over_tp: int = 0
    recomputed: bool | None = None

    @property
    def tied_parameters(self) -> int:
        return sum(t.parameters for t in self.tied)

    def tied_as(self, group: str) -> Tied:
        """What the block holds of a group: nothing if it is not in it."""
        return next((t for t in self.tied if t.group == group), Tied(group, 0, 0))

    @property
    def options(self) -> tuple[PartialRecompute, ...]:
        """All ways to recompute the block, whole last."""
        if self.recomputed is False:
            return ()
        rebuilt = max(0, self.saved_bytes - self.saved_input_bytes)
        whole = PartialRecompute(
            FULL, (), self.forward_compute, self.forward_comm, self.input_bytes, rebuilt
        )
        return (whole,) if self.recomputed else (*self.partial, whole)

    def option(self, label: str) -> PartialRecompute:
        """The way to recompute the block that has this label."""
        return next(o for o in self.options if o.label == label)

    @property
    def least_kept(self) -> int:
        """Bytes kept per micro-batch, recomputed in whatever way or not."""
        return min([self.saved_bytes, *(o.kept for o in self.options)])

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


# What can be asked for the bytes of its parameters, gradients and states.
Held = BlockCost | Tied


@dataclass(frozen=True)
class ChainCost:
    """The prices of all blocks of a model, in order, under one choice of placements.

    `boundary`: placement of the values that pass from block to block (for example `R` or `S(1)`);
    `label` tells alternatives apart for a reader; `placements[block][op]` and `cp_placements` as in
    `Plan`.
    """

    boundary: str
    label: str
    blocks: tuple[BlockCost, ...]
    placements: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    cp_placements: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Alternative:
    """A choice of placements before its full price is known.

    `least`: bytes and times that its price can't undercut; the seconds of a block are exact, but
    only as the sum of forward and backward. `price` answers with the full price; it may take long.
    """

    boundary: str
    least: ChainCost
    price: Callable[[], ChainCost]


def with_last_holders(blocks: Sequence[BlockCost]) -> tuple[BlockCost, ...]:
    """The blocks of a chain, with what they tie marked as held by a later block or not."""
    seen: set[str] = set()
    found = []
    for block in reversed(blocks):
        tied = tuple(replace(t, last=t.group not in seen) for t in block.tied)
        seen |= {t.group for t in tied}
        found.append(replace(block, tied=tied) if tied else block)
    return tuple(reversed(found))


def tie_groups(blocks: Sequence[BlockCost]) -> tuple[str, ...]:
    """The groups of tied parameters that some of `blocks` hold, in the order of the chain."""
    return tuple(dict.fromkeys(t.group for b in blocks for t in b.tied))


class CostProvider(Protocol):
    """What the search asks a model; answers are computed on demand and kept by the provider.

    `holds_parameters`: of every block, in order: a pipeline stage needs one that does.
    """

    block_names: tuple[str, ...]
    holds_parameters: tuple[bool, ...]

    def tp_degrees(self, limit: int) -> list[int]:
        """Legal tensor-parallel degrees up to `limit`."""

    def microbatch_sizes(self, most: int) -> list[int]:
        """Micro-batch sizes up to `most` that the captured program allows."""

    def alternatives(self, tp: int, microbatch: int) -> Sequence[Alternative]:
        """The choices of placements to choose from."""

    def optimistic(self, tp: int, microbatch: int) -> ChainCost:
        """Cheap lower bounds of every time and byte of every alternative."""


@runtime_checkable
class SequenceProvider(CostProvider, Protocol):
    """A provider whose model can also be split along the sequence, over cp ranks; `sequence` is its
    length (1: there is none, for the reason `no_sequence`)."""

    @property
    def sequence(self) -> int: ...

    @property
    def no_sequence(self) -> str: ...

    def cp_degrees(self, limit: int) -> list[int]:
        """Legal context-parallel degrees up to `limit`."""

    def over(self, cp: int, tp: int) -> CostProvider:
        """The prices of the model on one of `cp` ranks, for `tp`."""


@runtime_checkable
class ExpertProvider(CostProvider, Protocol):
    """A provider whose model has layers of experts that replicas can split; `experts`: the number
    that their degree has to divide (1: there are none, for the reason `no_experts`)."""

    @property
    def experts(self) -> int: ...

    @property
    def no_experts(self) -> str: ...

    def over(self, cp: int, tp: int, ep: int = 1) -> CostProvider:
        """The prices of the model on one of `cp` ranks and of `ep` ranks, for `tp`."""
