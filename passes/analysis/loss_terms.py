"""The auxiliary terms of a loss: what is added to it that reads fewer of the batch's inputs.

    loss = cross_entropy(logits, labels) + 0.1 * balance(router(x))

The second term does not read the labels. So do losses that balance experts, z-losses of routers,
and norms of the parameters, however the model names them.

Understood are sums and differences of scalars (`+`, `-`, `torch.add` and `torch.sub` with `alpha`,
`sum(...)`), inside of each other, of casts, of negations and of products and quotients with Python
numbers. Anything else is one term as it is: `torch.stack(terms).sum()`, or a sum that a tensor
multiplies. So is a multiple of a sum that has only auxiliary terms. Numbers that are added are no
terms.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autopar.passes.analysis.aliases import ancestors
from autopar.passes.analysis.loss_term_names import Path, term_name
from autopar.program import Program

# What a scalar goes through unchanged.
_SAME = frozenset(["to", "_to_copy", "clone", "view", "reshape", "squeeze"])


@dataclass(frozen=True, slots=True)
class Addend:
    """A term of a sum: `node` times `factor`. `path`: from the sum to it, each op with the place
    of the argument that leads on."""

    node: fx.Node
    factor: float
    path: Path


def auxiliary_terms(program: Program) -> dict[str, str]:
    """The name of each: the expression of the model's code that is added, or where there is none.
    By node of the program; also of what a term is cast from, and of every sum that has only such
    terms: a block may get it as one value.

    Empty where the loss is no sum, or all of its terms read the same inputs.
    """
    loss = next(n for n in program.graph.nodes if n.name == program.loss)
    terms = list(addends(loss))
    batch = {i.name for i in program.inputs if i.kind == "input"}
    reads = {t.node: _read(program, t.node) & batch for t in terms}
    fewer = {n for n, own in reads.items() if any(own < other for other in reads.values())}
    only = _sums_of(fewer, terms)
    found: dict[str, str] = {}
    terms = list(addends(loss, known={node.name for node in only}))
    for term in terms:
        if term.node in fewer | only:
            own = [term.node]
            while is_same(own[-1]):
                own += own[-1].all_input_nodes
            name = term_name((*term.path, *((node, 0) for node in own[:-1])), own[-1])
            for node in own:
                found.setdefault(node.name, name)
    for total in only:
        inner = dict.fromkeys(
            found[term.node.name] for term in terms if any(node is total for node, _ in term.path)
        )
        if inner:
            found[total.name] = " + ".join(inner)
    return found


def _sums_of(wanted: set[fx.Node], terms: list[Addend]) -> set[fx.Node]:
    """What has no other terms than these."""
    inside = {node for term in terms for node, _ in term.path}
    return inside - {node for t in terms if t.node not in wanted for node, _ in t.path}


def addends(
    value: fx.Node,
    through: Callable[[fx.Node], bool] = lambda node: False,
    known: Container[str] = (),
) -> Iterator[Addend]:
    """The terms of a sum, in order, one for each time that it is added. `through`: other ops of one
    tensor that are linear. What has no sum inside is one term, with its casts and factors; so is
    the product of a sum with a number, where its name is `known`."""
    yield from _addends(Addend(value, 1.0, ()), through, known)


def _addends(
    whole: Addend, through: Callable[[fx.Node], bool], known: Container[str]
) -> Iterator[Addend]:
    operands = _operands(whole.node, through)
    product = set(operands.values()) != {1.0} and len(operands) == 1
    if not _has_sum(whole.node, through) or (product and whole.node.name in known):
        yield whole
        return
    for place, factor in operands.items():
        inner = whole.node.args[place]
        assert isinstance(inner, fx.Node)
        path = (*whole.path, (whole.node, place))
        yield from _addends(Addend(inner, whole.factor * factor, path), through, known)


def _has_sum(node: fx.Node, through: Callable[[fx.Node], bool]) -> bool:
    while len(operands := _operands(node, through)) == 1:
        inner = node.args[next(iter(operands))]
        assert isinstance(inner, fx.Node)
        node = inner
    return len(operands) > 1


def _operands(node: fx.Node, through: Callable[[fx.Node], bool]) -> dict[int, float]:
    """Places of arguments, and the factors with which they are the terms of this op; none where it
    is not linear."""
    if is_same(node) or through(node):
        return {0: 1.0}
    if not all(map(_is_scalar, node.all_input_nodes)):
        return {}
    name = str(getattr(node.target, "_opname", "")).removesuffix("_")
    if name == "neg":
        return {0: -1.0}
    tensors = [i for i, a in enumerate(node.args[:2]) if isinstance(a, fx.Node)]
    numbers = [a for a in node.args[:2] if isinstance(a, int | float)]
    if len(tensors) + len(numbers) != 2 or not set(node.kwargs) <= {"alpha"}:
        return {}
    if name in ("add", "sub", "rsub"):
        alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
        if not isinstance(alpha, int | float):
            return {}
        factors = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[name]
        return {place: float(factors[place]) for place in tensors}
    if len(numbers) == 1 and name == "mul":
        return {tensors[0]: float(numbers[0])}
    if len(numbers) == 1 and name == "div" and tensors == [0] and numbers[0]:
        return {0: 1 / numbers[0]}
    return {}


def is_same(node: fx.Node) -> bool:
    """Whether this is a scalar, through a cast or the like; sums begin with x + 0."""
    sources = node.all_input_nodes
    if len(sources) != 1 or not _is_scalar(sources[0]):
        return False
    name = str(getattr(node.target, "_opname", ""))
    return name in _SAME or (name == "add" and node.args == (sources[0], 0))


def _read(program: Program, term: fx.Node) -> set[str]:
    found = ancestors(program.graph, [term], through_sizes=False)
    return {n.name for n in found if n.op == "placeholder"}


def _is_scalar(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and not value.dim()
