"""Let a micro-batch that nothing is counted in give a finite gradient.

loss = div(total, count)   ->   loss = div(total, masked_fill(count, eq(count, 0), 1))

A masked mean over a micro-batch whose mask is empty is 0 / 0. Its weight in the loss of the batch
is 0, but 0 times the infinite slope of the division would be no number. Where something is counted
nothing changes; a batch without anything to count is refused by the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autopar.parts import Parts
from autopar.passes.analysis.loss_form import loss_form
from autopar.program import copy_graph

aten = torch.ops.aten


@dataclass(frozen=True)
class GuardEmptyMean:
    name: str = "guard-empty-mean"

    def run(self, parts: Parts) -> Parts:
        form = loss_form(parts.program)
        if form.kind != "ratio" or form.count is None:
            return parts
        program = parts.program.with_graph(copy_graph(parts.program.graph_module))
        nodes = {n.name: n for n in program.graph.nodes}
        count = nodes[form.count.name]
        divisions = [n for n in count.users if n.target is aten.div.Tensor and n.args[1] is count]
        for division in divisions:
            with program.graph.inserting_before(division):
                empty = _made(program.graph, aten.eq.Scalar, (count, 0), division, torch.bool)
                safe = _made(program.graph, aten.masked_fill.Scalar, (count, empty, 1), division)
            division.update_arg(1, safe)
        program.graph_module.recompile()
        return parts.evolve(program=program)


def _made(
    graph: fx.Graph,
    target: torch._ops.OpOverload,
    args: tuple[fx.Node | int, ...],
    like: fx.Node,
    dtype: torch.dtype | None = None,
) -> fx.Node:
    count = args[0]
    assert isinstance(count, fx.Node)
    made = graph.call_function(target, args)
    value: torch.Tensor = count.meta["val"]
    made.meta = {**like.meta, "requires_grad": False}
    made.meta["val"] = value.new_empty(value.shape, dtype=dtype or value.dtype)
    return made
