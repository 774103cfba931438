"""A block with experts as a static graph: six tokens, four experts, two choices."""

from __future__ import annotations

import torch
from torch import fx

from autopar.cluster import Cluster
from autopar.parts import Slot
from autopar.passes.analysis.blocks import analyse_blocks
from autopar.passes.capture import capture
from autopar.passes.rewrite.split_experts import expert_calls
from autopar.runtime import collectives  # noqa: F401 - registers the ops
from autopar.workflow.block_kinds import BlockKinds, Kind
from autopar.workflow.prepare import prepare
from tests.passes.expert_toys import library

CLUSTER = Cluster.parse("h100:4x8")
SEQUENCE = 16


def mixtral_layer() -> Kind:
    """The repeated block of a small Mixtral, for one sequence."""
    model, inputs = library("mixtral")
    program = capture(model, inputs, name="mixtral")
    sizes = {"batch": 1, "sequence": SEQUENCE}
    program = prepare(program, sizes)
    kinds = BlockKinds(program, analyse_blocks(program), sizes, CLUSTER).at(1)
    return next(kind for kind in kinds.values() if expert_calls(kind.graph))


def held(graph: fx.GraphModule, slots: tuple[Slot, ...]) -> dict[str, torch.Size]:
    """Shapes of the parameters of experts."""
    nodes = graph.graph.find_nodes(op="placeholder")
    return {
        slot.name: node.meta["val"].shape
        for node, slot in zip(nodes, slots, strict=True)
        if ".experts." in slot.name
    }
