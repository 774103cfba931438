"""The auxiliary terms of a loss: what is added to it that reads fewer of the batch's inputs.

    loss = cross_entropy(logits, labels) + 0.1 * balance(router(x))

The second term does not read the labels. So do losses that balance experts, z-losses of routers,
and norms of the parameters, however the model names them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autopar.passes.analysis.aliases import ancestors
from autopar.program import Program, user_line

_SAME = frozenset(["to", "_to_copy", "clone", "view", "reshape", "squeeze"])


@dataclass(frozen=True, slots=True)
class LossTerm:
    """`node`: of the program, as it is added to the loss. `name`: its line in the model's code, or
    its module."""

    node: str
    name: str


def auxiliary_terms(program: Program) -> tuple[LossTerm, ...]:
    """In order; none where the loss is no sum, or all of its terms read the same inputs."""
    loss = next(n for n in program.graph.nodes if n.name == program.loss)
    terms = list(added(loss))
    batch = {i.name for i in program.inputs if i.kind == "input"}
    reads = [_read(program, term) & batch for term in terms]
    found: dict[str, LossTerm] = {}
    for term, own in zip(terms, reads, strict=True):
        if any(own < other for other in reads):
            name = _name(term)
            alike = sum(t.name.partition(" #")[0] == name for t in found.values())
            name += f" #{alike + 1}" * bool(alike)
            found.setdefault(term.name, LossTerm(term.name, name))
    return tuple(found.values())


def added(value: fx.Node) -> Iterator[fx.Node]:
    """The terms of a sum of scalars, through casts."""
    name = str(getattr(value.target, "_opname", ""))
    sources = value.all_input_nodes
    if name in ("add", "add_") and not value.kwargs and all(map(_is_scalar, sources)) and sources:
        for source in value.args[:2]:
            if isinstance(source, fx.Node):
                yield from added(source)
    elif name in _SAME and _is_scalar(sources[0]):
        yield from added(sources[0])
    else:
        yield value


def _read(program: Program, term: fx.Node) -> set[str]:
    found = ancestors(program.graph, [term], through_sizes=False)
    return {n.name for n in found if n.op == "placeholder"}


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.dim()


def _name(term: fx.Node) -> str:
    line = str(term.meta.get("stack_trace", "")).strip().rpartition("\n")[2]
    code = re.sub(r"\s*#.*", "", line).strip()
    return re.sub(r"^\w+\s*\+?=\s*", "", code) or user_line(term) or term.name
