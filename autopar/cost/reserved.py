"""From the bytes that tensors ask for to what a device must have.

allocated  the five terms of `autopar.cost.memory`: torch.cuda.max_memory_allocated
reserved   what the caching allocator holds for them: torch.cuda.max_memory_reserved
device     with the driver's context and communication buffers: what nvidia-smi shows
needed     what a device must have at least: before it fails, the allocator gives back what it only
           caches, so a run fits where little more than the allocated bytes does

The ratios to the allocated bytes are stated margins (`data/footprint.toml`), not predictions.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from autopar.cost.evaluate import Evaluation
from autopar.cost.setting import Setting

DATA = Path(__file__).parent.parent / "data" / "footprint.toml"


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of the fullest rank. `allocated`: of a rank of every stage."""

    allocated: tuple[int, ...]
    reserved_over_allocated: float
    needed_over_allocated: float
    context_bytes: int

    @property
    def allocated_bytes(self) -> int:
        return max(self.allocated)

    @property
    def reserved_bytes(self) -> int:
        return int(self.allocated_bytes * self.reserved_over_allocated)

    @property
    def device_bytes(self) -> int:
        return self.reserved_bytes + self.context_bytes

    @property
    def needed_bytes(self) -> int:
        return int(self.allocated_bytes * self.needed_over_allocated) + self.context_bytes

    def reported(self, kind: str) -> int:
        """The bytes that a way of measuring shows: `allocated`, `reserved`, `device`, or
        `allocated last` (of the last stage) and `allocated first`."""
        if kind == "allocated last":
            return self.allocated[-1]
        if kind == "allocated first":
            return self.allocated[0]
        return {
            "allocated": self.allocated_bytes,
            "reserved": self.reserved_bytes,
            "device": self.device_bytes,
        }[kind]


@cache
def _data() -> dict[str, Any]:
    return tomllib.loads(DATA.read_text(encoding="utf-8"))


def footprint(evaluation: Evaluation, setting: Setting) -> Footprint:
    """What every stage of an evaluated configuration takes."""
    return Footprint(
        tuple(m.total for m in evaluation.memory_per_stage),
        float(_data()["reserved_over_allocated"]),
        float(_data()["needed_over_allocated"]),
        setting.cluster.device.context_bytes,
    )
