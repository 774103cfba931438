"""Cut the program into its shared part and one static graph per kind of block.

one graph of 32 layers   ->   shared, embed, model.layers.0 (x32), head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autopar.op_call import Bindings
from autopar.parts import Parts, Slot
from autopar.passes.analysis.aliases import ancestors
from autopar.passes.analysis.blocks import Block, Blocks, analyse_blocks
from autopar.passes.analysis.loss_form import loss_form
from autopar.passes.rewrite.specialize import cut
from autopar.program import Program, outputs_of, tensors_of


@dataclass(frozen=True)
class CutBlocks:
    name: str = "cut-blocks"

    def run(self, parts: Parts) -> Parts:
        blocks = parts.blocks or analyse_blocks(parts.program)
        bindings = Bindings(parts.program.symbols, parts.decided.sizes)
        graphs, slots = {}, {}
        for kind in blocks.kinds:
            graphs[kind], slots[kind] = cut_block(parts.program, blocks.block(kind), bindings)
        return parts.evolve(
            blocks=blocks,
            graphs=graphs,
            slots=slots,
            shared=cut_shared(parts.program, blocks, bindings),
            count=cut_count(parts.program, blocks, bindings),
        )


def cut_block(
    program: Program, block: Block, bindings: Bindings
) -> tuple[fx.GraphModule, tuple[Slot, ...]]:
    """The static graph of one block and what its placeholders are: parameters, buffers, values."""
    by_name = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    inputs = [by_name[n] for n in (*block.parameters, *block.buffers)] + block.reads
    graph = cut(program, block.nodes, inputs, block.writes, bindings)
    return graph, block_slots(program, block)


def block_slots(program: Program, block: Block) -> tuple[Slot, ...]:
    items = {i.name: i for i in program.inputs}
    slots = [Slot("parameter", items[n].target) for n in block.parameters]
    slots += [Slot("buffer", items[n].target) for n in block.buffers if items[n].kind == "buffer"]
    return (*slots, *(Slot("value", n.name) for n in block.reads))


def cut_shared(program: Program, blocks: Blocks, bindings: Bindings) -> fx.GraphModule | None:
    """Buffers and batch inputs -> the parameter-free values (or batch inputs) that blocks read."""
    owned = {n for b in blocks.chain for n in b.nodes}
    wanted = list(dict.fromkeys(n for b in blocks.chain for n in b.reads if n not in owned))
    if not wanted:
        return None
    return cut_free(program, blocks, wanted, bindings)


def cut_count(program: Program, blocks: Blocks, bindings: Bindings) -> fx.GraphModule | None:
    """The graph that counts what the loss is a mean over; None when all parts count alike."""
    form = loss_form(program)
    if form.count is None:
        return None
    module = cut_free(program, blocks, [form.count], bindings)
    if form.kind == "targets":
        output = module.graph.output_node()
        with module.graph.inserting_before(output):
            valid = module.graph.call_function(
                torch.ops.aten.ne.Scalar, (outputs_of(module.graph)[0], form.ignore)
            )
            total = module.graph.call_function(torch.ops.aten.sum.default, (valid,))
        output.args = ((total,),)
        module.recompile()
    else:
        _return_least(module)
    return module


def _return_least(module: fx.GraphModule) -> None:
    """Beside a sum of weights also the least of them: a part whose weights cancel out still has a
    loss, which its mean can't tell."""
    total = outputs_of(module.graph)[0]
    if getattr(total.target, "_opname", "") != "sum":
        return
    weights = total.args[0]
    value = weights.meta.get("val") if isinstance(weights, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dtype is torch.bool or not value.numel():
        return
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        least = module.graph.call_function(torch.ops.aten.min.default, (weights,))
    output.args = ((total, least),)
    module.recompile()


def cut_free(
    program: Program, blocks: Blocks, wanted: list[fx.Node], bindings: Bindings
) -> fx.GraphModule:
    """The part of the shared nodes that `wanted` needs."""
    needed = ancestors(program.graph, wanted)
    inputs = [
        n
        for n in program.graph.find_nodes(op="placeholder")
        if n in needed and tensors_of(n.meta.get("val"))
    ]
    nodes = [n for n in blocks.shared if n in needed]
    return cut(program, nodes, inputs, wanted, bindings)
