"""The configuration that prices are computed for: all but cuts, recomputation and placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autopar.cluster import Cluster
from autopar.cost.optimizer import OPTIMIZERS, Optimizer
from autopar.interleaving import CHUNKED, DIVIDED, V_SHAPED, parts_of
from autopar.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per element of parameters at rest and in compute, of gradients kept and reduced;
    `dtype`: name of the compute dtype."""

    storage: int
    compute: int
    gradient: int
    reduce: int
    dtype: str = "bfloat16"


# What the runtime executes, and so what can be planned.
PRECISION = {
    "fp32": Precision(storage=4, compute=4, gradient=4, reduce=4, dtype="float32"),
    "bf16-mixed": Precision(storage=4, compute=2, gradient=4, reduce=4),
    "bf16": Precision(storage=2, compute=2, gradient=2, reduce=2),
    "fp16": Precision(storage=2, compute=2, gradient=2, reduce=2, dtype="float16"),
}
# What other frameworks execute as well, and so what can be evaluated: 16-bit gradients that are
# accumulated as such (Megatron-DeepSpeed with fp16), reduced as such (FSDP's `reduce_dtype`), or
# kept beside the float32 ones that they are added to (DeepSpeed's BF16_Optimizer, nanotron).
EVALUATED_PRECISION = {
    **PRECISION,
    "bf16-grads": Precision(storage=4, compute=2, gradient=2, reduce=2),
    "bf16-reduce": Precision(storage=4, compute=2, gradient=4, reduce=2),
    "bf16-accumulated": Precision(storage=4, compute=2, gradient=6, reduce=4),
}


@dataclass(frozen=True, slots=True)
class Practice:
    """How a framework carries out a plan; the default is the runtime of this package.

    `overlap_gradients`, `overlap_gathers`: the data-parallel reduction of gradients hides behind
    the last backward, the gathering of parameters behind compute. `bucket_bytes`: fixed buffers
    for communication. `gradient_buffer`: gradients of ZeRO-0 and 1 are one buffer that is there
    from the start; a parameter's own is added to it at once (`each`) or at the end of a whole
    backward (`end`). `gradient_buckets`: there is a copy of all gradients in the compute type
    besides, which is reduced. `reduce_whole`: gradients are all-reduced where ZeRO-1 needs a shard
    of them only. `split_sends`: pipeline stages pass on a part of a value that all ranks of tp
    hold, and gather it again. `block_seconds`: host work for each block and micro-batch that the
    device waits for; `step_seconds`: the same once per step.
    """

    overlap_gradients: bool = True
    overlap_gathers: bool = True
    bucket_bytes: int = 0
    gradient_buffer: Literal["", "each", "end"] = ""
    gradient_buckets: bool = False
    reduce_whole: bool = False
    split_sends: bool = False
    block_seconds: float = 0.0
    step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Phase:
    """One backward of a stage: `in_flight` micro-batches are alive when it starts. Before the
    `first` of a step there are no gradients."""

    in_flight: int
    first: bool

    @staticmethod
    def fullest(in_flight: Sequence[int], setting: Setting) -> tuple[Phase, ...]:
        """Of all backwards of a step, given their micro-batches alive, those that can be the
        fullest moment: the first, unless as much is alive in one that has all gradients. (If that
        is the last, it gives back what was gathered for the step, and the first does not.)"""
        first, later = in_flight[0], max(in_flight[1:], default=0)
        phases = (Phase(first, True), Phase(later, False))
        if not later:
            return phases[:1]
        if setting.gathers_once and setting.microbatches == 2:
            return phases
        return phases[1:] if later >= first else phases


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the outer search: mesh, micro-batches, schedule, ZeRO level and given inputs.

    `microbatch` is the size on one data-parallel rank, `microbatches` how many of them one step
    has. `chunks`: parts of the model that each stage holds (`autopar.interleaving`).
    """

    cluster: Cluster
    mesh: Mesh
    microbatch: int
    microbatches: int
    schedule: str = "1f1b"
    zero: int = 0
    precision: str = "fp32"
    optimizer: str = "adamw"
    chunks: int = 1
    practice: Practice = Practice()

    @property
    def bytes(self) -> Precision:
        return EVALUATED_PRECISION[self.precision]

    @property
    def divided(self) -> bool:
        """Whether backwards are divided into those of values and those of weights."""
        return self.schedule in DIVIDED

    @property
    def in_turns(self) -> bool:
        """Whether parts of the chain take turns in another order than that of 1F1B or GPipe."""
        return self.schedule in CHUNKED

    @property
    def turns(self) -> list[int]:
        """The parts whose next one is on the same rank: where a V turns."""
        return [self.mesh.pp - 1] if self.schedule in V_SHAPED else []

    def parts_of(self, rank: int) -> tuple[int, ...]:
        """The parts of the chain that a pp rank holds, by its chunks."""
        return parts_of(self.schedule, rank, self.mesh.pp, self.chunks)

    @property
    def update(self) -> Optimizer:
        return OPTIMIZERS[self.optimizer]

    @property
    def shards(self) -> int:
        """Over how many ranks optimizer state is split (1: every rank holds all of it)."""
        return self.mesh.dp_shard if self.zero >= 1 else 1

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 runs the blocks."""
        return self.mesh.replicas > 1 and self.zero > 0 and not self.practice.gradient_buffer

    @property
    def gathers_once(self) -> bool:
        """Whether FSDP2 gathers parameters for a whole step (ZeRO-1 and 2)."""
        return self.fsdp and self.zero < 3

    @property
    def may_keep(self) -> bool:
        """Whether some blocks may be kept gathered, and others not."""
        return self.zero == 3 and self.mesh.replicas > 1 and not self.in_turns

    @property
    def keeping(self) -> Setting:
        """ZeRO-3 as it is for a block whose parameters are kept gathered: as ZeRO-2."""
        return replace(self, zero=2) if self.zero == 3 else self

    @property
    def expert_shards(self) -> int:
        """The same for experts that ep splits."""
        return self.mesh.expert_replicas if self.zero >= 1 else 1

    def shard(self, elements: int, experts: int = 0) -> int:
        """Elements of `elements` on one rank, the largest share (FSDP2 pads to equal shares);
        `experts`: those among them that ep splits."""
        rest = -(-(elements - experts) // self.shards)
        return rest - (-experts // self.expert_shards)

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations stage `stage` (from 0) holds at its fullest moment.

        A single stage is no pipeline: it runs one micro-batch after the other. Of schedules
        `in_turns` `autopar.cost.evaluate` counts them.
        """
        if self.mesh.pp == 1:
            return 1
        if self.schedule == "gpipe":
            return self.microbatches
        return min(self.microbatches, self.mesh.pp - stage)

    def phases(self, stage: int) -> tuple[Phase, ...]:
        """The backwards of stage `stage` that can be its fullest moment: the first, and the one
        after it. (1F1B brings one more forward between the two, while there are any.)"""
        m, most = self.microbatches, self.in_flight(stage)
        if self.mesh.pp == 1:
            return Phase.fullest([1] * min(m, 2), self)
        after = m - 1 if self.schedule == "gpipe" else min(m - 1, most)
        return Phase.fullest([most, after] if m > 1 else [most], self)
