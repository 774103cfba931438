"""The configuration that prices are computed for: all but cuts, recomputation and placements."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.cluster import Cluster
from autopar.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per element of parameters at rest and in compute, of gradients kept and reduced."""

    storage: int
    compute: int
    gradient: int
    reduce: int


PRECISION = {
    "fp32": Precision(storage=4, compute=4, gradient=4, reduce=4),
    "bf16-mixed": Precision(storage=4, compute=2, gradient=4, reduce=4),
    "bf16": Precision(storage=2, compute=2, gradient=2, reduce=2),
}
# Optimizer states per parameter, each held in the storage type of the parameter.
OPTIMIZER_STATES = {"adamw": 2, "sgd": 0, "sgd-momentum": 1}


@dataclass(frozen=True, slots=True)
class Setting:
    """One point of the outer search: mesh, micro-batches, schedule, ZeRO level and given inputs.

    `microbatch` is the size on one data-parallel rank, `microbatches` how many of them one step
    has.
    """

    cluster: Cluster
    mesh: Mesh
    microbatch: int
    microbatches: int
    schedule: str = "1f1b"
    zero: int = 0
    precision: str = "fp32"
    optimizer: str = "adamw"

    @property
    def bytes(self) -> Precision:
        return PRECISION[self.precision]

    @property
    def states(self) -> int:
        return OPTIMIZER_STATES[self.optimizer]

    @property
    def shards(self) -> int:
        """Over how many ranks optimizer state is split (1: every rank holds all of it)."""
        return self.mesh.dp if self.zero >= 1 else 1

    def shard(self, elements: int) -> int:
        """Elements of `elements` on one rank, the largest share (FSDP2 pads to equal shares)."""
        return -(-elements // self.shards)

    def in_flight(self, stage: int) -> int:
        """Micro-batches whose activations stage `stage` (from 0) holds at its fullest moment.

        A single stage is no pipeline: it runs one micro-batch after the other.
        """
        if self.mesh.pp == 1:
            return 1
        if self.schedule == "gpipe":
            return self.microbatches
        return min(self.microbatches, self.mesh.pp - stage)
