"""Hand out the auxiliary terms of the loss beside it.

mul = mul(balance, 0.1)                    mul = mul(balance, 0.1)
add = cross_entropy_loss + mul       ->    add = cross_entropy_loss + mul
loss = autopar.all_reduce(add, 'tp')       loss = autopar.all_reduce(add, 'tp')
return (loss,)                             detach = detach(mul)
                                           all_reduce = autopar.all_reduce(detach, 'tp')
                                           return (loss, all_reduce)

What ranks do to the sum they do to a term of it: their collectives are linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.parts import Parts
from autopar.passes.analysis.loss_terms import LossTerm, auxiliary_terms
from autopar.program import outputs_of

# What a sum of scalars goes through unchanged.
_SAME = frozenset(["to", "_to_copy", "clone", "view", "reshape", "squeeze"])


@dataclass(frozen=True)
class TellLossTerms:
    name: str = "tell-loss-terms"

    def run(self, parts: Parts) -> Parts:
        wanted = auxiliary_terms(parts.program)
        last = parts.stages[-1]
        for place, block in enumerate(last.blocks if wanted else ()):
            if last.loss in block.outputs:
                found = tell_loss_terms(block.graph, block.outputs.index(str(last.loss)), wanted)
                told = {f"{term.name} of the loss": term.name for term in found}
                last.blocks[place] = replace(block, outputs=(*block.outputs, *told))
                for stage in parts.stages:
                    stage.loss_terms = told
        return parts


def tell_loss_terms(
    graph: fx.GraphModule, place: int, wanted: tuple[LossTerm, ...]
) -> tuple[LossTerm, ...]:
    """Edit a block's graph, as one rank runs it, in place; `place`: of the loss among its results.
    Returns those of `wanted` that are handed out behind the results."""
    by_node = {term.node: term for term in wanted}
    output = graph.graph.output_node()
    results = list(outputs_of(graph.graph))
    found = []
    for value, chain in _terms(results[place], ()):
        term = by_node.pop(_base(value).name, None)
        if term is None:
            continue
        with graph.graph.inserting_before(output):
            told = graph.graph.call_function(torch.ops.aten.detach.default, (value,))
            told.meta = {**value.meta, "requires_grad": False}
            for step in reversed(chain):
                told = graph.graph.call_function(_target(step), (told, *step.args[1:]), step.kwargs)
                told.meta = {**step.meta, "requires_grad": False}
        results.append(told)
        found.append(term)
    output.args = (tuple(results),)
    graph.recompile()
    return tuple(found)


def _target(node: fx.Node) -> Any:
    return node.target


def _terms(
    value: fx.Node, chain: tuple[fx.Node, ...]
) -> Iterator[tuple[fx.Node, tuple[fx.Node, ...]]]:
    """The terms of a sum, each with what its sum goes through on the way to the result."""
    target: Any = value.target
    name = str(getattr(target, "_opname", ""))
    sources = value.all_input_nodes
    if name in ("add", "add_") and not value.kwargs and len(sources) == 2:
        for source in sources:
            yield from _terms(source, chain)
    elif _passes(value) and name != "detach":
        inner = list(_terms(sources[0], (*chain, value)))
        # What is no sum is a term as it is, collectives and all.
        yield from inner if len(inner) > 1 else [(value, chain)]
    else:
        yield value, chain


def _passes(node: fx.Node) -> bool:
    return len(node.all_input_nodes) == 1 and (
        "reshard" in node.meta or str(getattr(node.target, "_opname", "")) in _SAME
    )


def _base(node: fx.Node) -> fx.Node:
    """The op of the program behind collectives and casts."""
    while _passes(node):
        node = node.all_input_nodes[0]
    return node
