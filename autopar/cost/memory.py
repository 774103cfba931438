"""The terms of the stated memory model: bytes per rank of a block's states and working memory.

`autopar.cost.fullest_moment` puts them together, moment by moment. Interleaved stages are bounded
by the largest of each term instead, as if all came at one moment: that is what the text below
says of activations and buffers (`held_memory`, `autopar.search.chunk_memory`).

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
    once = setting.microbatches > 1 or bool(setting.practice.gradient_buffer)
    whole = setting.zero == 0 or (setting.zero == 1 and once)
    return (trainable if whole else setting.shard(trainable)) * setting.bytes.gradient


def bucket_bytes(trainable: int, setting: Setting) -> int:
    """The copy of gradients that is reduced over dp, where there is one throughout."""
    copied = setting.practice.gradient_buckets and setting.mesh.dp > 1
    return trainable * setting.bytes.compute if copied else 0


def optimizer_bytes(trainable: int, setting: Setting) -> int:
    """The optimizer's states, in the storage type."""
    return setting.states * setting.shard(trainable) * setting.bytes.storage


def scratch_bytes(trainable: int, setting: Setting) -> int:
    """What is allocated and freed after the last backward; see the module's text."""
    step = setting.shard(trainable) * setting.bytes.storage if setting.states >= 2 else 0
    in_place = bool(setting.practice.gradient_buffer)
    whole = setting.zero == 0 and setting.mesh.dp > 1 and not in_place
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
    if setting.fsdp:
        inside = max(block.transient_bytes, block.reduced_transient_bytes)
        fresh = 0 if setting.zero == 1 and setting.microbatches > 1 else setting.bytes.compute
        return max(inside, block.trainable * (fresh + setting.bytes.reduce))
    cast = setting.bytes.compute != setting.bytes.gradient and not setting.practice.gradient_buffer
    return block.transient_bytes + (block.largest_parameter * setting.bytes.gradient if cast else 0)


def reducing_bytes(block: BlockCost, setting: Setting) -> int:
    """The copy of a block's gradients that is reduced while the block before it works."""
    return block.trainable * setting.bytes.reduce if setting.fsdp else 0


def rebuilt_bytes(block: BlockCost, made: int, setting: Setting) -> int:
    """What a recomputed block makes again (`made`, itself); its neighbour, recomputed too, is being
    reduced."""
    return made + max(0, reducing_bytes(block, setting) - block.input_bytes)


def followed_bytes(block: BlockCost, setting: Setting) -> int:
    """What a block leaves to be reduced, over the activations that it gives back."""
    return max(0, reducing_bytes(block, setting) - block.saved_bytes)
