"""Hand out the auxiliary terms of the loss beside it.

mul = mul(balance, 0.1)                    mul = mul(balance, 0.1)
add = cross_entropy_loss + mul       ->    add = cross_entropy_loss + mul
loss = autopar.all_reduce(add, 'tp')       loss = autopar.all_reduce(add, 'tp')
return (loss,)                             detach = detach(mul)
                                           all_reduce = autopar.all_reduce(detach, 'tp')
                                           return (loss, all_reduce)

What ranks do to the sum they do to a term of it: their collectives are linear. A term that is added
several times, subtracted, or inside a product with a number is told as the loss has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.parts import Parts
from autopar.passes.analysis.loss_terms import Addend, addends, auxiliary_terms, is_same
from autopar.program import outputs_of


@dataclass(frozen=True)
class TellLossTerms:
    name: str = "tell-loss-terms"

    def run(self, parts: Parts) -> Parts:
        wanted = auxiliary_terms(parts.program)
        last = parts.stages[-1]
        for place, block in enumerate(last.blocks if wanted else ()):
            if last.loss in block.outputs:
                names = tell_loss_terms(block.graph, block.outputs.index(str(last.loss)), wanted)
                told = {f"{name} of the loss": name for name in names}
                last.blocks[place] = replace(block, outputs=(*block.outputs, *told))
                for stage in parts.stages:
                    stage.loss_terms = told
        return parts


def tell_loss_terms(graph: fx.GraphModule, place: int, wanted: Mapping[str, str]) -> list[str]:
    """Edit a block's graph, as one rank runs it, in place; `place`: of the loss among its results.
    `wanted`: names by node. Returns those of what is handed out behind the results, in order, each
    once: the second of a name is "name #2"."""
    output = graph.graph.output_node()
    results = list(outputs_of(graph.graph))
    found: dict[str, list[Addend]] = {}
    for term in addends(results[place], through=_is_reshard, known=wanted):
        base = _base(term.node, wanted)
        if base in wanted:
            found.setdefault(base, []).append(term)
    names: list[str] = []
    for base, terms in found.items():
        alike = sum(wanted[other] == wanted[base] for other in list(found)[: len(names)])
        names.append(wanted[base] + f" #{alike + 1}" * bool(alike))
        with graph.graph.inserting_before(output):
            told = _told(graph.graph, terms[0])
            for term in terms[1:]:
                told = _call(torch.ops.aten.add.Tensor, told, _told(graph.graph, term))
        results.append(told)
    output.args = (tuple(results),)
    graph.recompile()
    return names


def _told(graph: fx.Graph, term: Addend) -> fx.Node:
    """Its value as the result has it, without gradient."""
    told = _call(torch.ops.aten.detach.default, term.node)
    if term.factor != 1:
        told = _call(torch.ops.aten.mul.Tensor, told, term.factor)
    for step, _ in reversed(term.path):
        if is_same(step) or _is_reshard(step):
            target: Any = step.target
            told = graph.call_function(target, (told, *step.args[1:]), step.kwargs)
            told.meta = {**step.meta, "requires_grad": False}
    return told


def _call(target: torch._ops.OpOverload, value: fx.Node, *others: fx.node.Argument) -> fx.Node:
    made = value.graph.call_function(target, (value, *others))
    # It lies as the value does; how that was made is not how this is.
    made.meta = {k: v for k, v in value.meta.items() if k not in ("strategy", "reshard")}
    made.meta["requires_grad"] = False
    return made


def _is_reshard(node: fx.Node) -> bool:
    return "reshard" in node.meta and len(node.all_input_nodes) == 1


def _base(node: fx.Node, wanted: Mapping[str, str]) -> str:
    """The wanted op of the program behind collectives and casts."""
    while node.name not in wanted and (_is_reshard(node) or is_same(node)):
        node = node.all_input_nodes[0]
    return node.name
