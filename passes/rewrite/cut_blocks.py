"""Cut the program into its shared part and one static graph per kind of block.

one graph of 32 layers   ->   shared, embed, model.layers.0 (x32), head
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from autopar.op_call import Bindings
from autopar.parts import Parts, Slot
from autopar.passes.analysis.blocks import Block, Blocks, analyse_blocks
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
    """The graph that counts the targets the loss is a mean over; None when it is no such mean."""
    loss = next(n for n in program.graph.nodes if n.name == program.loss)
    if getattr(loss.target, "_opname", "") != "cross_entropy_loss":
        return None
    reduction = loss.args[3] if len(loss.args) > 3 else loss.kwargs.get("reduction", 1)
    target = loss.args[1]
    free = set(blocks.shared) | set(program.graph.find_nodes(op="placeholder"))
    if reduction != 1 or not isinstance(target, fx.Node) or target not in free:
        return None
    ignore = loss.args[4] if len(loss.args) > 4 else loss.kwargs.get("ignore_index", -100)
    module = cut_free(program, blocks, [target], bindings)
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        valid = module.graph.call_function(
            torch.ops.aten.ne.Scalar, (outputs_of(module.graph)[0], ignore)
        )
        total = module.graph.call_function(torch.ops.aten.sum.default, (valid,))
    output.args = ((total,),)
    module.recompile()
    return module


def cut_free(
    program: Program, blocks: Blocks, wanted: list[fx.Node], bindings: Bindings
) -> fx.GraphModule:
    """The part of the shared nodes that `wanted` needs."""
    needed: set[fx.Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    inputs = [
        n
        for n in program.graph.find_nodes(op="placeholder")
        if n in needed and tensors_of(n.meta.get("val"))
    ]
    nodes = [n for n in blocks.shared if n in needed]
    return cut(program, nodes, inputs, wanted, bindings)
