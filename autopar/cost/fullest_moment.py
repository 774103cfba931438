"""The five terms of a stage at the fullest moment of a step, found among the moments of a step.

A moment is a block's backward in one of the stage's backwards. With k micro-batches alive when that
backward starts, there are at it

    what k - 1 micro-batches keep in the whole stage, with those shared values that backwards keep,
        or all that blocks read where something is recomputed
    what the oldest keeps in the blocks up to this one, and what is rebuilt if it is recomputed
    what the block works with (`autopar.cost.block_moment`)
    its gathered parameters (ZeRO-3), but not when its gradients are reduced, and those of the block
        before it, which is prefetched; in the forward the buffer that they came in instead, and
        before the block works that of the block before it. Those
        of blocks that are kept gathered are there at every moment; in their forward the buffer is
        that of the last block before them which was gathered. Under ZeRO-1 and 2 those of all
        blocks are, but in the last backward for those behind it
    gradients: in the first backward of a step those of the blocks behind it; later all. Where
        parameters are cast without FSDP2, also those of the blocks behind it in the compute type
    values and gradients under way across the borders of the stage

beside parameters and optimizer states. Of the backwards two can be the fullest: the first, and the
one after it, which has all gradients and as many micro-batches or one less (`Setting.phases`). The
end of the step has all gradients and scratch, and no activations.

What recomputation frees before a block depends on which blocks are recomputed. The search wants a
form that depends on their number and kind alone, so here are bounds that are reached when nothing
is recomputed and when all is (the largest error in between is one block that is rebuilt):

- k micro-batches keep k x (everything - what recomputation frees);
- blocks behind a block have given back at least what they keep when they are recomputed;
- a block that is not recomputed has before it at most what it has when nothing is recomputed;
- recomputation of one kind (as many bytes freed and rebuilt) counts with the fullest block of the
  stage that could be recomputed in that way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from autopar.block_cost import FULL, BlockCost, Held, PartialRecompute, tie_groups
from autopar.cost.block_moment import (
    at_end_bytes,
    end_gradient_bytes,
    end_parameter_bytes,
    gather_buffer_bytes,
    gathered_bytes,
    gives_back,
    gradients_given_back,
    gradients_inside,
    handed_on_bytes,
    inside_bytes,
    left_bytes,
    made_bytes,
    parameters_given_back,
    resharded_bytes,
    working_in_first_forward,
    working_in_forward,
)
from autopar.cost.memory import (
    StageMemory,
    bucket_bytes,
    gradient_bytes,
    in_turn_bytes,
    optimizer_bytes,
    parameter_bytes,
    scratch_bytes,
    tied_gathered_bytes,
)
from autopar.cost.setting import Phase, Setting


def kind_of(block: BlockCost, again: PartialRecompute) -> tuple[int, int]:
    """Recomputation of a kind frees as many bytes, and rebuilds as many."""
    return block.saved_bytes - again.kept, again.rebuilt


def rooted(blocks: Sequence[BlockCost]) -> frozenset[str]:
    """The groups of tied parameters that several blocks of a stage hold: no block owns them."""
    holders = Counter(t.group for b in blocks for t in b.tied)
    return frozenset(group for group, count in holders.items() if count > 1)


def shared_once(blocks: Sequence[BlockCost], term: Callable[[BlockCost], int]) -> int:
    """A term of shared values over blocks, once where several of them read the same ones."""
    most: dict[str, int] = {}
    own = 0
    for block in blocks:
        if block.shared_key:
            most[block.shared_key] = max(most.get(block.shared_key, 0), term(block))
        else:
            own += term(block)
    return own + sum(most.values())


def received_bytes(block: BlockCost, received: int) -> int:
    """Of a stage's input, what its first block does not itself keep."""
    return max(0, received - min(block.saved_input_bytes, block.input_bytes))


@dataclass(frozen=True, slots=True)
class _Moment:
    """Bytes at a block's backward, without those of the k - 1 micro-batches that are behind."""

    activations: int
    gradients: int
    gathered: int
    buffers: int

    @property
    def total(self) -> int:
        return self.activations + self.gradients + self.gathered + self.buffers


def stage_memory(
    blocks: Sequence[BlockCost],
    start: int,
    stop: int,
    recompute: Collection[str] | Mapping[str, str],
    stage: int,
    setting: Setting,
    phases: Sequence[Phase] | None = None,
    kept: Collection[str] = (),
) -> StageMemory:
    """Memory of stage number `stage`, holding `blocks[start:stop]` of the chain.

    `recompute`: names of blocks, or in which way each of them is recomputed (the label of one of
    its `options`); `phases`: the backwards that may be the fullest, if not those of
    the stated schedule; `kept`: names of blocks whose parameters are kept gathered.
    """
    labels = recompute if isinstance(recompute, Mapping) else dict.fromkeys(recompute, FULL)
    found = StageMoments.of(blocks, start, stop, labels, setting, kept)
    options = [found.at(phase) for phase in phases or setting.phases(stage)]
    return max([*options, found.end()], key=lambda memory: memory.total)


class StageMoments:
    """The moments of a stage with `blocks`, some recomputed in the ways of `recompute` (by name),
    the parameters of some `kept` gathered; `received` and `sent`: bytes that pass its borders per
    micro-batch; `again`: whether some block of the rank is recomputed."""

    def __init__(
        self,
        blocks: Sequence[BlockCost],
        recompute: Mapping[str, PartialRecompute],
        received: int,
        sent: int,
        setting: Setting,
        kept: Collection[str] = (),
        *,
        again: bool,
    ) -> None:
        self.blocks, self.setting = blocks, setting
        self.received, self.sent = received, sent
        self.again = {kind_of(b, recompute[b.name]) for b in blocks if b.name in recompute}
        self.shared = shared_once(blocks, lambda b: b.shared_kept_bytes)
        self.passing = received_bytes(blocks[0], received) + sent + self.shared
        self.kept = self.passing + sum(
            recompute[b.name].kept if b.name in recompute else b.saved_bytes for b in blocks
        )
        if again:  # what is recomputed keeps all that it reads
            more = shared_once(blocks, lambda b: b.shared_bytes) - self.shared
            self.kept, self.shared = self.kept + more, self.shared + more
        self.rooted = rooted(blocks)
        self.parameters = self.once(parameter_bytes)
        for group in self.rooted:
            tied = max(b.tied_as(group).parameters for b in blocks)
            self.parameters += tied_gathered_bytes(tied, setting)
        # Of each block: gathered for its moments alone, or throughout.
        gathered = [gathered_bytes(b, setting, rooted=self.rooted) for b in blocks]
        self.gathered = [0 if b.name in kept else n for b, n in zip(blocks, gathered, strict=True)]
        self.parameters += sum(gathered) - sum(self.gathered)
        # In the forward of a kept block FSDP2 still has the buffer of the one gathered last.
        buffers = [gather_buffer_bytes(b, setting, rooted=self.rooted) for b in blocks]
        self.buffered = [0 if b.name in kept else n for b, n in zip(blocks, buffers, strict=True)]
        self.gathers = [n > 0 for n in self.buffered]
        for index in range(1, len(blocks)):
            if blocks[index].name in kept:
                before = [n for n in self.gathered[:index] if n]
                self.buffered[index] = before[-1] if before else 0
        self.gradients = self.once(gradient_bytes)
        self.optimizer = self.once(optimizer_bytes)
        in_turn = max(in_turn_bytes(b, setting) for b in blocks)
        self.scratch = max(self.once(scratch_bytes), in_turn)
        self.buckets = setting.practice.bucket_bytes + self.once(bucket_bytes)
        self.buckets += self._left_throughout()
        self._count_behind()
        # Parameters and gradients that are gone once its last backward is over.
        self.given_back = (
            sum(parameters_given_back(b, setting) for b in blocks),
            sum(gradients_given_back(b, setting) for b in blocks),
        )
        self._fullest: dict[bool, _Moment] = {}

    def _left_throughout(self) -> int:
        """Gradients of tied parameters whose last holder in the chain is in some other stage: the
        last one here leaves them."""
        found = 0
        for group in self.rooted:
            held = [b.tied_as(group) for b in self.blocks if b.tied_as(group).parameters]
            if not any(t.last for t in held):
                found += max(t.trainable for t in held) * self.setting.bytes.compute
        return found

    def _count_behind(self) -> None:
        """What the blocks behind each block leave, the gradients that they have made, and what they
        have given back."""
        blocks, setting = self.blocks, self.setting
        self.left_behind = self._behind_each(
            [left_bytes(b, setting, rooted=self.rooted) for b in blocks]
        )
        self.made_behind = self._behind_each(
            [made_bytes(b, setting, rooted=self.rooted) for b in blocks]
        )
        self.resharded_behind = {
            first: self._behind_each(
                [resharded_bytes(b, setting, first=first, rooted=self.rooted) for b in blocks]
            )
            for first in (True, False)
        }

    @staticmethod
    def of(
        blocks: Sequence[BlockCost],
        start: int,
        stop: int,
        labels: Mapping[str, str],
        setting: Setting,
        kept: Collection[str] = (),
        *,
        again: bool | None = None,
    ) -> StageMoments:
        """Those of `blocks[start:stop]` of the chain; `labels`: how blocks are recomputed;
        `again`: whether some block of the rank is, if it holds more than these."""
        mine = blocks[start:stop]
        received = blocks[start - 1].boundary_bytes if start else 0
        sent = blocks[stop - 1].boundary_bytes if stop < len(blocks) else 0
        ways = {b.name: b.option(labels[b.name]) for b in mine if b.name in labels}
        some = bool(ways) if again is None else again
        return StageMoments(mine, ways, received, sent, setting, kept, again=some)

    @staticmethod
    def _behind_each(values: Sequence[int]) -> list[int]:
        """[i] -> the sum of values[i + 1:]."""
        return [*accumulate(reversed(values[1:]), initial=0)][::-1]

    def once(self, term: Callable[[Held, Setting], int]) -> int:
        """A term over all blocks; parameters that several of them tie count once."""
        total = sum(term(b, self.setting) for b in self.blocks)
        for group in tie_groups(self.blocks):
            same = [term(b.tied_as(group), self.setting) for b in self.blocks]
            total += max(same) - sum(same)
        return total

    def end(self) -> StageMemory:
        """The reduction of gradients and the optimizer's step: no activations."""
        parameters = self.once(end_parameter_bytes)
        gradients = self.once(end_gradient_bytes)
        return StageMemory(parameters, gradients, self.optimizer, 0, self.scratch)

    def at(self, phase: Phase) -> StageMemory:
        """The fullest moment of one backward."""
        if phase.first not in self._fullest:
            self._fullest[phase.first] = self._fullest_of(phase.first)
        fullest = self._fullest[phase.first]
        activations = (phase.in_flight - 1) * self.kept + fullest.activations
        shared = min(phase.in_flight * self.shared, activations)
        return StageMemory(
            self.parameters + fullest.gathered,
            fullest.gradients,
            self.optimizer,
            activations - shared,
            fullest.buffers + shared,
        )

    def _fullest_of(self, first: bool) -> _Moment:
        """Of the first backward of a step or a later one."""
        plain = max(self._plain(first), key=lambda m: m.total)
        floor = max(self._behind(first, rebuilt=False), key=lambda m: m.total)
        options = [min(plain, floor, key=lambda m: m.total), *self._behind(first, rebuilt=True)]
        return max(options, key=lambda m: m.total)

    def _plain(self, first: bool) -> list[_Moment]:
        """As if no block before a block were recomputed."""
        found, before = [], self.passing
        for index, block in enumerate(self.blocks):
            before += block.saved_bytes
            found.append(self._moment(index, before, first))
        return found

    def _behind(self, first: bool, *, rebuilt: bool) -> list[_Moment]:
        """As if all blocks behind a block were recomputed; `rebuilt`: this block too, in the ways
        of which some block is."""
        found, behind = [], 0
        for index in reversed(range(len(self.blocks))):
            block = self.blocks[index]
            own = [o.rebuilt for o in block.options if kind_of(block, o) in self.again]
            ways: list[int | None] = [*own] if rebuilt else [None]
            found += [self._moment(index, self.kept - behind, first, way) for way in ways]
            behind += block.least_kept
        return found

    def _moment(self, index: int, kept: int, first: bool, rebuilt: int | None = None) -> _Moment:
        """`kept` till then; `rebuilt`: by the block, if it is recomputed."""
        activations = kept + (rebuilt or 0)
        block, setting = self.blocks[index], self.setting
        after = self.blocks[index + 1] if index + 1 < len(self.blocks) else None
        # The gradient that the backward before sent away.
        around = self.buckets + (0 if first else self.received)
        # A block's own work includes the gradients of its results; the stage's outlive it.
        around += self.sent if after is not None else 0
        around += self.left_behind[index]
        gradients = self.gradients
        if first and not setting.practice.gradient_buffer:
            gradients = self.made_behind[index]
        gathered = self.gathered[index] - self.resharded_behind[first][index]
        prefetched = self.gathered[index - 1] if index else 0
        released = min(block.released_bytes, activations)
        # A block after it may be reduced meanwhile.
        beside = handed_on_bytes(after, setting, rooted=self.rooted) if after is not None else 0
        working = inside_bytes(block) + beside
        staying = min(gradients_inside(block, setting), working) if first else 0
        inside = _Moment(
            *(activations - released, gradients + staying, gathered + prefetched),
            around + working + released - staying,
        )
        # FSDP2 gives the block's parameters back before it reduces their gradients.
        gone, given = min(block.saved_bytes, activations), self._own_gathered(index, first)
        working = at_end_bytes(block, setting, first=first, rooted=self.rooted, beside=beside)
        working += gone - block.saved_bytes
        staying = min(made_bytes(block, setting, rooted=self.rooted), working) if first else 0
        # The gradient of what the stage sends outlives the block that got it.
        working += self.sent if after is None else 0
        end = _Moment(
            *(activations - gone, gradients + staying, gathered + prefetched - given),
            around + working - staying,
        )
        if gives_back(setting, first=first):
            # In the forward nothing is given back yet: if it is the only one, what blocks behind
            # have is not there yet, and no gradients are.
            around -= self.left_behind[index]
            gradients = 0 if first else self.gradients
            gathered = self.gathered[index] - (self.resharded_behind[True][index] if first else 0)
        gathered += self.buffered[index]
        working = working_in_forward(block)
        if rebuilt is not None:
            working = working_in_first_forward(block, rebuilt)
        forward = _Moment(kept, gradients, gathered, around + working)
        # Before it, while its parameters are copied out of the buffer that they came in, FSDP2
        # still has the buffer of the block before.
        before = self.buffered[index - 1] if index and self.gathers[index] else 0
        nothing = gone - block.saved_bytes
        arrival = _Moment(activations - gone, gradients, gathered + before, around + nothing)
        return max(inside, end, forward, arrival, key=lambda m: m.total)

    def _own_gathered(self, index: int, first: bool) -> int:
        """What a block gives back of its gathered parameters as its backward ends."""
        block, setting = self.blocks[index], self.setting
        resharded = resharded_bytes(block, setting, first=first, rooted=self.rooted)
        return self.gathered[index] + resharded
