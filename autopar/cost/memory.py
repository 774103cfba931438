"""The terms of the stated memory model: bytes per rank of a block's states and working memory.

With n parameter elements on a tensor-parallel rank, d data-parallel ranks, and s / c / g / r bytes
per element at rest / in compute / as gradient / reduced:

| term       | d = 1, ZeRO-0 | ZeRO-1               | ZeRO-2      | ZeRO-3                         |
| ---------- | ------------- | -------------------- | ----------- | ------------------------------ |
| parameters | n s (+ n c)   | n s/d + n c          | n s/d + n c | n s/d + c (two largest blocks) |
| gradients  | n g           | n g (n g/d if m = 1) | n g/d       | n g/d                          |
| optimizer  | k n s         | k n s/d              | k n s/d     | k n s/d                        |

k counts the optimizer's states; those that are no copies of a parameter (Adafactor, 8-bit AdamW) go
by its shape: `autopar.cost.optimizer`. Without sharding there is a compute copy (n c) only where
the types differ. ZeRO-1 to 3 are FSDP2, block by block: n c is its gathered buffer; of ZeRO-3's
gathered blocks one is in use and one is prefetched; parameters tied between blocks belong to the
root and stay gathered. Gradients, optimizer state and reductions count trainable parameters only; a
tied parameter counts once per stage.

Activations and working memory are alive at different moments: `autopar.cost.fullest_moment` says
which of a stage's are together, `autopar.cost.block_moment` what a block works with, and
`autopar.cost.chunked_moment` what the chunks of an interleaved pipeline hold for each other. When
activations are gone there is scratch instead: torch's foreach AdamW holds one more copy of a state,
an optimizer that updates one parameter after the other some copies of the largest, and ZeRO-0's
all-reduce up to one of all gradients.

`context_bytes` of the device lie outside the allocator and outside these terms: they are subtracted
from the device's memory, as is a margin for fragmentation, when no explicit limit is given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.block_cost import BlockCost, Held
from autopar.cluster import Device
from autopar.cost import optimizer
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

    @staticmethod
    def together(held: Sequence[StageMemory]) -> StageMemory:
        """Term by term, what one rank has that holds all of these."""
        return StageMemory(
            sum(h.parameters for h in held),
            sum(h.gradients for h in held),
            sum(h.optimizer for h in held),
            sum(h.activations for h in held),
            sum(h.buffers for h in held),
        )

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


def parameter_shard(held: Held, setting: Setting) -> int:
    """Elements of the parameters on one rank."""
    return setting.shard(held.parameters, held.experts.parameters)


def trainable_shard(held: Held, setting: Setting) -> int:
    """Elements of the trainable parameters on one rank."""
    return setting.shard(held.trainable, held.experts.trainable)


def parameter_bytes(held: Held, setting: Setting) -> int:
    """Storage, and the compute copy unless it is gathered block by block (ZeRO-3)."""
    storage = parameter_shard(held, setting) * setting.bytes.storage
    return storage + (held.parameters * setting.bytes.compute if keeps_copy(setting) else 0)


def keeps_copy(setting: Setting) -> bool:
    """A whole copy of all parameters in the compute type stays on the rank."""
    if setting.mesh.replicas == 1 or setting.zero == 0:
        return setting.bytes.compute != setting.bytes.storage
    return setting.zero < 3


def tied_gathered_bytes(tied: int, setting: Setting) -> int:
    """Tied parameters belong to the root of FSDP2 and stay gathered under ZeRO-3."""
    return tied * setting.bytes.compute if setting.mesh.replicas > 1 and setting.zero == 3 else 0


def gradient_bytes(held: Held, setting: Setting) -> int:
    """Accumulated gradients: whole, or a shard where they are scattered in every backward."""
    once = setting.microbatches > 1 or bool(setting.practice.gradient_buffer)
    whole = setting.zero == 0 or (setting.zero == 1 and once)
    elements = held.trainable if whole else trainable_shard(held, setting)
    return elements * setting.bytes.gradient


def bucket_bytes(held: Held, setting: Setting) -> int:
    """The copy of gradients that is reduced over dp, where there is one throughout."""
    copied = setting.practice.gradient_buckets and setting.mesh.replicas > 1
    return held.trainable * setting.bytes.compute if copied else 0


def optimizer_bytes(held: Held, setting: Setting) -> int:
    """The optimizer's states, in the storage type or quantised."""
    experts, each = held.experts, setting.bytes.storage
    rest = optimizer.without(held.shapes, experts.shapes)
    return optimizer.state_bytes(
        setting.optimizer, rest, held.trainable - experts.trainable, setting.shards, each
    ) + optimizer.state_bytes(
        setting.optimizer, experts.shapes, experts.trainable, setting.expert_shards, each
    )


def state_bytes(held: Held, setting: Setting) -> int:
    """Parameters and optimizer states."""
    return parameter_bytes(held, setting) + optimizer_bytes(held, setting)


def scratch_bytes(held: Held, setting: Setting) -> int:
    """What is allocated and freed after the last backward; see the module's text."""
    step = setting.update.all_at_once * trainable_shard(held, setting) * setting.bytes.storage
    in_place = bool(setting.practice.gradient_buffer)
    whole = setting.zero == 0 and setting.mesh.replicas > 1 and not in_place
    return max(step, held.trainable * setting.bytes.gradient if whole else 0)


def in_turn_bytes(block: BlockCost, setting: Setting) -> int:
    """What a step that goes through the parameters in turn works with, at the largest."""
    copies = setting.update.one_by_one * setting.bytes.storage
    if not copies:
        return 0
    rest = optimizer.without(block.shapes, block.experts.shapes)
    return copies * max(
        optimizer.largest_part(rest, setting.shards),
        optimizer.largest_part(block.experts.shapes, setting.expert_shards),
    )
