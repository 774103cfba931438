"""The stated memory model: five terms per rank, in bytes, at the fullest moment of a step.

With n parameter elements on a tensor-parallel rank, d data-parallel ranks, and s / c / g / r bytes
per element at rest / in compute / as gradient / reduced:

| term       | d = 1, ZeRO-0 | ZeRO-1               | ZeRO-2      | ZeRO-3                         |
| ---------- | ------------- | -------------------- | ----------- | ------------------------------ |
| parameters | n s (+ n c)   | n s/d + n c          | n s/d + n c | n s/d + c (two largest blocks) |
| gradients  | n g           | n g (n g/d if m = 1) | n g/d       | n g/d                          |
| optimizer  | k n s         | k n s/d              | k n s/d     | k n s/d                        |

k counts the optimizer's states. Without sharding there is a compute copy (n c) only where the types
differ. ZeRO-1 to 3 are FSDP2, block by block: n c is its gathered buffer; of ZeRO-3's gathered
blocks one is in use and one is prefetched; parameters tied between blocks belong to the root and
stay gathered. Gradients, optimizer state and reductions count trainable parameters only; a tied
parameter counts once per stage.

activations = in flight x (per block: saved bytes, or only its inputs if recomputed; and the stage's
input and output, which the pipeline engine keeps until their backward) + the largest recomputed
block's saved bytes, rebuilt while its backward runs. In flight: min(m, pp - stage) for 1F1B, m for
GPipe, and one at a time without a pipeline.

buffers = largest working memory of a block + one gradient under way across each boundary of the
stage. Working memory is what comes and goes inside the block's backward (or forward), its fresh
gradients included; with FSDP2 also what the block leaves at its end: all its gradients, and their
copy that is being reduced, which lives on while the next block works (but the block's own
activations do not). When activations are gone there is scratch instead: torch's foreach AdamW
holds one more copy of a state, and ZeRO-0's all-reduce up to one of all gradients.

With one micro-batch gradients take the place of activations: a block's are there when what it kept
is not. At the fullest moment there are those gradients only that are larger than what their block
kept. Buffers are at least what makes up the end of the step: all gradients and scratch.

`context_bytes` of the device lie outside the allocator and outside these terms: they are subtracted
from the device's memory, as is a margin for fragmentation, when no explicit limit is given.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autopar.block_cost import BlockCost
from autopar.cluster import Device
from autopar.cost.setting import Setting

DEFAULT_MARGIN = 0.08


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes on each rank of one stage; `total` is the sum of the five terms."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    def to_dict(self) -> dict[str, int]:
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "buffers": self.buffers,
            "total": self.total,
        }


def memory_limit(device: Device, margin: float = DEFAULT_MARGIN) -> int:
    """Bytes the five terms may take on `device`: all but its context and a fragmentation margin."""
    return int(device.memory_bytes * (1.0 - margin)) - device.context_bytes


def parameter_bytes(elements: int, setting: Setting) -> int:
    """Storage, and the compute copy unless it is gathered block by block (ZeRO-3)."""
    storage = setting.shard(elements) * setting.bytes.storage
    return storage + (elements * setting.bytes.compute if keeps_copy(setting) else 0)


def keeps_copy(setting: Setting) -> bool:
    """A whole copy of all parameters in the compute type stays on the rank."""
    if setting.mesh.dp == 1 or setting.zero == 0:
        return setting.bytes.compute != setting.bytes.storage
    return setting.zero < 3


def gathered_bytes(block: BlockCost, setting: Setting) -> int:
    """What ZeRO-3 gathers for one block and frees again; tied parameters are not among it."""
    if setting.mesh.dp == 1 or setting.zero < 3:
        return 0
    return (block.parameters - block.tied_parameters) * setting.bytes.compute


def tied_gathered_bytes(tied: int, setting: Setting) -> int:
    """Tied parameters belong to the root of FSDP2 and stay gathered under ZeRO-3."""
    return tied * setting.bytes.compute if setting.mesh.dp > 1 and setting.zero == 3 else 0


def gradient_bytes(trainable: int, setting: Setting) -> int:
    """Accumulated gradients: whole, or a shard where they are scattered in every backward."""
    whole = setting.zero == 0 or (setting.zero == 1 and setting.microbatches > 1)
    return (trainable if whole else setting.shard(trainable)) * setting.bytes.gradient


def optimizer_bytes(trainable: int, setting: Setting) -> int:
    """The optimizer's states, in the storage type."""
    return setting.states * setting.shard(trainable) * setting.bytes.storage


def scratch_bytes(trainable: int, setting: Setting) -> int:
    """What is allocated and freed after the last backward; see the module's text."""
    step = setting.shard(trainable) * setting.bytes.storage if setting.states >= 2 else 0
    whole = setting.zero == 0 and setting.mesh.dp > 1
    return max(step, trainable * setting.bytes.gradient if whole else 0)


def late_gradient_bytes(trainable: int, kept: int, setting: Setting) -> int:
    """Of one block's gradients, what is there at the fullest moment of a step with one
    micro-batch. `kept`: bytes of what the block keeps for its backward."""
    return max(0, gradient_bytes(trainable, setting) - kept)


def held_bytes(trainable: int, kept: int, setting: Setting) -> int:
    """What a block keeps; with one micro-batch, or its gradients in their place."""
    if setting.microbatches > 1:
        return kept
    return kept + late_gradient_bytes(trainable, kept, setting)


def working_bytes(block: BlockCost, setting: Setting) -> int:
    """What comes and goes in a block's backward."""
    if setting.mesh.dp > 1 and setting.zero > 0:
        inside = max(block.transient_bytes, block.reduced_transient_bytes)
        fresh = 0 if setting.zero == 1 and setting.microbatches > 1 else setting.bytes.compute
        return max(inside, block.trainable * (fresh + setting.bytes.reduce))
    cast = setting.bytes.compute != setting.bytes.gradient
    return block.transient_bytes + (block.largest_parameter * setting.bytes.gradient if cast else 0)


def reducing_bytes(block: BlockCost, setting: Setting) -> int:
    """The copy of a block's gradients that is reduced while the block before it works."""
    sharded = setting.mesh.dp > 1 and setting.zero > 0
    return block.trainable * setting.bytes.reduce if sharded else 0


def rebuilt_bytes(block: BlockCost, setting: Setting) -> int:
    """What a recomputed block makes again; its neighbour, recomputed too, is being reduced."""
    return block.saved_bytes + max(0, reducing_bytes(block, setting) - block.input_bytes)


def followed_bytes(block: BlockCost, setting: Setting) -> int:
    """What a block leaves to be reduced, over the activations that it gives back."""
    return max(0, reducing_bytes(block, setting) - block.saved_bytes)


def stage_memory(
    blocks: Sequence[BlockCost],
    start: int,
    stop: int,
    recompute: Collection[str],
    stage: int,
    setting: Setting,
) -> StageMemory:
    """Memory of stage number `stage`, holding `blocks[start:stop]` of the chain."""
    mine = blocks[start:stop]
    tied = [b.tied_parameters for b in mine]
    again = sum(tied) - max(tied)  # counted by more than one block of this stage

    def add(term: object, field: str) -> int:
        assert callable(term)
        total = sum(term(getattr(b, field), setting) for b in mine)
        kind = "tied_parameters" if field == "parameters" else "tied_trainable"
        same = [getattr(b, kind) for b in mine]
        doubled = sum(term(t, setting) for t in same) - term(max(same), setting)
        return int(total - doubled if again else total)

    largest_two = sorted((gathered_bytes(b, setting) for b in mine), reverse=True)[:2]
    parameters = (
        add(parameter_bytes, "parameters")
        + sum(largest_two)
        + tied_gathered_bytes(max(tied), setting)
    )
    received = blocks[start - 1].boundary_bytes if start else 0
    sent = blocks[stop - 1].boundary_bytes if stop < len(blocks) else 0
    activations = activation_bytes(
        mine, recompute, setting.in_flight(stage), received + sent, setting
    )
    buffers = (
        max(working_bytes(b, setting) for b in mine)
        + max((followed_bytes(b, setting) for b in mine[1:]), default=0)
        + received
        + sent
    )
    gradients = add(gradient_bytes, "trainable")
    scratch = gradients + add(scratch_bytes, "trainable")
    if setting.microbatches == 1:
        kept = {b.name: b.input_bytes if b.name in recompute else b.saved_bytes for b in mine}
        gradients = sum(late_gradient_bytes(b.trainable, kept[b.name], setting) for b in mine)
    return StageMemory(
        parameters=parameters,
        gradients=gradients,
        optimizer=add(optimizer_bytes, "trainable"),
        activations=activations,
        buffers=max(buffers, scratch - gradients - activations),
    )


def activation_bytes(
    blocks: Sequence[BlockCost],
    recompute: Collection[str],
    in_flight: int,
    passing: int,
    setting: Setting,
) -> int:
    """Kept per micro-batch in flight, and the one recomputed block that is being rebuilt.

    `passing`: bytes of the stage's input and output.
    """
    kept = sum(b.input_bytes if b.name in recompute else b.saved_bytes for b in blocks)
    rebuilt = max((rebuilt_bytes(b, setting) for b in blocks if b.name in recompute), default=0)
    return in_flight * (kept + passing) + rebuilt
