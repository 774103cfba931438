"""Split the sequence of every sample over the ranks of cp: the plan's placements on that axis.

k = …                      # S(2)         k_1 = autopar.all_gather(k, 2, 4, 'cp')
y = sdpa(q, k, v, causal)  # rows   ->    y = autopar.attention_rows(q, k_1, v_1, …, 4, 'cp')

What comes out is a block graph like any other, of the shapes of one cp rank: all later passes work
on it. Values with gradient pass from block to block as parts of the sequence (dim 1); parameters
are whole, and their gradients are terms of a sum over cp as they are over dp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from autopar.errors import PlanError
from autopar.op_call import Bindings, types_of
from autopar.parts import Parts, Slot
from autopar.passes.analysis.candidates import Candidates
from autopar.passes.analysis.sequence_candidates import sequence_candidates
from autopar.passes.rewrite.insert_collectives import insert_collectives
from autopar.passes.rewrite.localize_shapes import localize_shapes
from autopar.passes.rewrite.own_random import own_random
from autopar.passes.rewrite.place import PARAMETER, place, relative
from autopar.placement import Shard

AXIS = "cp"
BOUNDARY = Shard(1)
# What the placement on this axis wrote, and the next axis writes anew.
_MARKS = (
    "placement", "strategy", "name_in_plan", "flops", "reshard", "source_placement", "global_shape",
)  # fmt: skip


@dataclass(frozen=True)
class SplitSequence:
    name: str = "split-sequence"

    def run(self, parts: Parts) -> Parts:
        plan = parts.decided
        ranks = plan.mesh.cp
        if ranks == 1:
            return parts
        bindings = Bindings(parts.program.symbols, plan.sizes)
        for node in parts.blocks.crossing_any:
            value = types_of(node, bindings)[0]
            if value.requires_grad and (len(value.shape) < 2 or value.shape[1] % ranks):
                raise PlanError(
                    f"cp {ranks} can't split {node.name} of shape {list(value.shape)} along dim 1",
                    next_step="use a cp that divides the sequence, or cp 1",
                )
        for kind, graph in parts.graphs.items():
            chosen = plan.cp_placements.get(kind, {})
            split_sequence(kind, graph, parts.slots[kind], chosen, ranks)
        return parts


def split_sequence(
    kind: str,
    graph: fx.GraphModule,
    slots: tuple[Slot, ...],
    chosen: Mapping[str, str],
    ranks: int,
    found: Candidates | None = None,
) -> None:
    """Edit a static block graph in place. `chosen`: strategies by the names of the plan's
    `cp_placements`; `found`: the candidates of the graph, if the caller has them already."""
    found = found or sequence_candidates(graph, ranks)
    placeholders = graph.graph.find_nodes(op="placeholder")
    stored = {
        PARAMETER + relative(slot.name, kind): "R*"
        for node, slot in zip(placeholders, slots, strict=True)
        if slot.kind == "parameter" and node.meta.get("requires_grad")
    }
    place(kind, graph, slots, {**chosen, **stored}, BOUNDARY, ranks, found)
    insert_collectives(graph, BOUNDARY, ranks, AXIS)
    localize_shapes(graph, ranks, AXIS)
    own_random(graph, AXIS)
    for node in graph.graph.nodes:
        for mark in _MARKS:
            node.meta.pop(mark, None)
