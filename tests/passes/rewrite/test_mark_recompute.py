"""Recomputation is a mark on blocks of stages."""

from __future__ import annotations

from autopar.passes.pass_manager import run_passes
from autopar.passes.pipeline import back_pipeline
from autopar.passes.rewrite.mark_recompute import MarkRecompute
from autopar.plan_document import StagePlan
from tests.passes import toys


def test_exactly_the_planned_blocks_are_marked() -> None:
    names = [b.name for b in toys.blocks("mlp").chain]
    stages = (
        StagePlan(tuple(names[:2]), ("layers.0",)),
        StagePlan(tuple(names[2:]), ("layers.1", "head")),
    )
    parts, _ = run_passes(toys.start("mlp", toys.plan("mlp", stages=stages)), back_pipeline()[:-1])
    for stage in parts.stages:
        for block in stage.blocks:
            block.recompute = not block.recompute
    marked = MarkRecompute().run(parts)
    found = {b.name: b.recompute for s in marked.stages for b in s.blocks}
    assert found == {"embed": False, "layers.0": True, "layers.1": True, "head": True}
    # Blocks of one kind share a graph, not the mark.
    assert marked.stages[0].blocks[1].graph is marked.stages[1].blocks[0].graph
