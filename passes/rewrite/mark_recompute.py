"""Mark the blocks whose forward is repeated in the backward instead of keeping its values.

block model.layers.3   ->   block model.layers.3  # recomputed in the backward
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.parts import Parts


@dataclass(frozen=True)
class MarkRecompute:
    name: str = "mark-recompute"

    def run(self, parts: Parts) -> Parts:
        for stage, planned in zip(parts.stages, parts.decided.stages, strict=True):
            for block in stage.blocks:
                block.recompute = block.name in planned.recompute
        return parts
