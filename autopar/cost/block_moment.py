"""Bytes of one block while its backward runs, beside what was kept for it, and what it leaves."""

from __future__ import annotations

from collections.abc import Collection

from autopar.block_cost import BlockCost, Held
from autopar.cost.memory import (
    gradient_bytes,
    parameter_shard,
    trainable_shard,
)
from autopar.cost.setting import Setting


def sharded(setting: Setting) -> bool:
    """Whether FSDP2 runs the blocks."""
    return setting.fsdp


def delayed(setting: Setting) -> bool:
    """Whether gradients stay whole until the last backward of the step (ZeRO-1)."""
    return setting.zero == 1 and setting.microbatches > 1


def handed_on_bytes(block: BlockCost, setting: Setting, *, rooted: Collection[str]) -> int:
    """The copy of a block's gradients that is reduced while the block before it works."""
    if delayed(setting) or not sharded(setting):
        return 0
    return _own_trainable(block, rooted) * setting.bytes.reduce


def casts(setting: Setting) -> bool:
    """Whether the runtime casts parameters once for a step; FSDP2 casts what it gathers. Autograd
    then casts gradients back at the end of a whole backward."""
    if setting.practice.gradient_buffer:
        return setting.practice.gradient_buffer == "end"
    return not sharded(setting) and setting.bytes.compute != setting.bytes.storage


def left_bytes(block: BlockCost, setting: Setting, *, rooted: Collection[str]) -> int:
    """Gradients in the compute type that a block leaves to the end of the backward: all where they
    are cast back then; else those of `rooted` groups of parameters, which wait for the ones of the
    first block that holds them. Only the last holder leaves them: others add theirs."""
    waiting = sum(t.trainable for t in block.tied if t.group in rooted and t.last)
    if casts(setting):
        return (block.trainable - _added(block, rooted)) * setting.bytes.compute
    return waiting * setting.bytes.compute


def summed_bytes(block: BlockCost, setting: Setting, *, rooted: Collection[str]) -> int:
    """A block's own gradients, and the sum of some of them and those that a later holder of the
    same parameters left: for a moment there are all three. 0 where none were left."""
    added = _added(block, rooted)
    return (block.trainable + added) * setting.bytes.compute if added else 0


def _own_trainable(block: BlockCost, rooted: Collection[str]) -> int:
    """Elements of the gradients that the block's own group of FSDP2 reduces."""
    return block.trainable - sum(t.trainable for t in block.tied if t.group in rooted)


def _added(block: BlockCost, rooted: Collection[str]) -> int:
    """Elements of gradients that a later holder left."""
    return sum(t.trainable for t in block.tied if t.group in rooted and not t.last)


def gathered_bytes(block: BlockCost, setting: Setting, *, rooted: Collection[str]) -> int:
    """What ZeRO-3 gathers for one block and frees again. `rooted`: groups of parameters that
    another block of the stage holds too belong to the root of FSDP2, which stays gathered."""
    if setting.mesh.replicas == 1 or setting.zero < 3:
        return 0
    return _not_rooted(block, rooted) * setting.bytes.compute


def gives_back(setting: Setting, *, first: bool) -> bool:
    """Whether FSDP2 gives back in a backward, the last one of the step, what it had gathered for
    all of the step (ZeRO-1 and 2). `first`: it is the first one too."""
    return setting.gathers_once and setting.microbatches == (1 if first else 2)


def resharded_bytes(
    block: BlockCost, setting: Setting, *, first: bool, rooted: Collection[str]
) -> int:
    """What FSDP2 `gives_back` of a block's parameters at the end of its backward, while those of
    the blocks before it go on."""
    if not gives_back(setting, first=first):
        return 0
    return _not_rooted(block, rooted) * setting.bytes.compute


def parameters_given_back(block: BlockCost, setting: Setting) -> int:
    """Of what a block holds of its parameters, what is gone once its last backward of a step is
    over, to the end of the step: what FSDP2 had gathered for all of it (ZeRO-1 and 2). Parameters
    that other blocks tie are left out, as they may go on."""
    if not setting.gathers_once:
        return 0
    return (block.parameters - block.tied_parameters) * setting.bytes.compute


def gradients_given_back(block: BlockCost, setting: Setting) -> int:
    """The same of gradients: whole ones that were reduced to a shard (ZeRO-1)."""
    if not sharded(setting) or not delayed(setting):
        return 0
    elements = block.trainable - sum(t.trainable for t in block.tied)
    shard = setting.shard(elements, block.experts.trainable)
    return (elements - shard) * setting.bytes.gradient


def given_back_bytes(block: BlockCost, setting: Setting) -> int:
    """Both."""
    return parameters_given_back(block, setting) + gradients_given_back(block, setting)


def _not_rooted(block: BlockCost, rooted: Collection[str]) -> int:
    """Elements of the parameters that the block's own group of FSDP2 holds."""
    return block.parameters - sum(t.parameters for t in block.tied if t.group in rooted)


def made_bytes(block: BlockCost, setting: Setting, *, rooted: Collection[str] = ()) -> int:
    """Gradients that a block has made by its end, in the first backward of a step: none where they
    were there before, nor those that it leaves to another holder of the same parameters."""
    if _ready(setting):
        return 0
    left = [t for t in block.tied if t.group in rooted and t.last]
    return gradient_bytes(block, setting) - sum(gradient_bytes(t, setting) for t in left)


def _ready(setting: Setting) -> bool:
    """Whether the gradients are there before the first backward makes any."""
    return casts(setting) or bool(setting.practice.gradient_buffer)


def inside_bytes(block: BlockCost) -> int:
    """The most that comes and goes inside a block's backward, on top of all that it saved. The
    gradients of its parameters stay to its end: parameters are read before all else, so autograd
    comes to them last."""
    return max(0, max(block.transient_bytes, block.reduced_transient_bytes) - block.shared_bytes)


def gradients_inside(block: BlockCost, setting: Setting) -> int:
    """Of `inside_bytes`, in the first backward of a step, the gradients that stay."""
    stay = setting.zero == 0 or delayed(setting)
    whole = block.reduced_transient_bytes > block.transient_bytes
    if not (stay and whole) or _ready(setting):
        return 0
    return min(block.reduced_gradient_bytes, inside_bytes(block))


def working_in_forward(block: BlockCost) -> int:
    """The most that a block works with in its forward, on top of all that it saves: with shared
    values that only the forward reads."""
    return max(0, block.forward_transient_bytes - block.shared_kept_bytes)


def working_in_first_forward(block: BlockCost, rebuilt: int) -> int:
    """The same of a block that is recomputed and then rebuilds so many bytes, on top of what it
    keeps till then: at most `rebuilt` more than of one that keeps all."""
    return min(block.fleeting_bytes, working_in_forward(block) + rebuilt)


def gather_buffer_bytes(block: BlockCost, setting: Setting, *, rooted: Collection[str]) -> int:
    """The buffer that FSDP2 gathered a block's parameters in: it has it until the next block's are,
    so while the block goes forward. With ZeRO-1 and 2 only the first forward of a step gathers; in
    it memory can be fullest if there is no other one."""
    if setting.zero == 3 or not sharded(setting) or setting.microbatches > 1:
        return gathered_bytes(block, setting, rooted=rooted)
    return _not_rooted(block, rooted) * setting.bytes.compute


def at_end_bytes(
    block: BlockCost, setting: Setting, *, first: bool, rooted: Collection[str], beside: int = 0
) -> int:
    """`end_bytes`, or what is there a moment before, when gradients of `rooted` parameters are
    added to those that a later holder left, `beside` the reduction of the block after it; then
    these are gone."""
    summed = summed_bytes(block, setting, rooted=rooted)
    found = end_bytes(block, setting, first=first, rooted=rooted)
    if not summed:
        return found
    return max(summed + beside, found - _added(block, rooted) * setting.bytes.compute)


def end_bytes(
    block: BlockCost, setting: Setting, *, first: bool, rooted: Collection[str] = ()
) -> int:
    """What is there at the end of a block's backward, when nothing of what it saved is left.

    `first`: backward of a step, which makes the gradients that later ones are added to.
    """
    size = setting.bytes
    fresh = block.trainable * size.compute
    if not sharded(setting):
        return fresh
    own = gradient_bytes(block, setting) if first else 0
    if not delayed(setting):
        # Gradients go when they are copied, all but the last one. The reduced shard, which is the
        # gradient that is kept or is added to it, comes after that.
        # Those of `rooted` parameters wait for the root.
        waiting = [t for t in block.tied if t.group in rooted]
        elements = _own_trainable(block, rooted)
        if first:
            shard = own - sum(gradient_bytes(t, setting) for t in waiting)
        else:
            shards = trainable_shard(block, setting)
            shard = (shards - sum(trainable_shard(t, setting) for t in waiting)) * size.reduce
        staying = (block.trainable - elements + block.last_parameter) * size.compute
        return elements * size.reduce + max(fresh, shard + staying)
    if first:
        return own + (fresh if size.compute != size.gradient else 0)
    return max(fresh, block.trainable * size.reduce)


def end_parameter_bytes(held: Held, setting: Setting) -> int:
    """Parameters at the end of the step, when copies of them are given back."""
    return parameter_shard(held, setting) * setting.bytes.storage


def end_gradient_bytes(held: Held, setting: Setting) -> int:
    """Gradients at the end of the step: scattered by then, whenever that was."""
    return trainable_shard(held, setting) * setting.bytes.gradient
