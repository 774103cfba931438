"""Which ops draw random numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

# Ops that may draw, depending on an argument: its name, and the value with which not.
_OPTIONAL = {
    "dropout": (("p", 0.0), ("train", False)),
    "dropout_": (("p", 0.0), ("train", False)),
    "alpha_dropout": (("p", 0.0), ("train", False)),
    "feature_dropout": (("p", 0.0), ("train", False)),
    "feature_alpha_dropout": (("p", 0.0), ("train", False)),
    "native_dropout": (("p", 0.0), ("train", False)),
    "rrelu": (("training", False),),
    "scaled_dot_product_attention": (("dropout_p", 0.0),),
}

# Ops whose numbers, one for each element, are drawn apart: no element knows of another.
_APART = frozenset(
    ["rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "uniform", "normal",
     "normal_functional", "bernoulli", "exponential", "geometric", "log_normal", "cauchy", "random",
     "poisson"]
)  # fmt: skip


def draws_apart(node: fx.Node) -> bool:
    """Whether a call draws a number of its own for each element of the result, so that samples
    do not depend on each other by it."""
    return draws(node) and str(getattr(node.target, "_opname", "")) in _APART


def draws(node: fx.Node) -> bool:
    """Whether a call draws random numbers when it runs."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    given = {a.name: v for a, v in zip(node.target._schema.arguments, node.args, strict=False)}
    given |= node.kwargs
    defaults = {a.name: a.default_value for a in node.target._schema.arguments}
    for name, without in _OPTIONAL.get(node.target._opname, ()):
        if given.get(name, defaults.get(name)) == without:
            return False
    return True


def without_drawing(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, so that an op that may draw does not (a dropout of 0)."""
    args, kwargs = list(node.args), dict(node.kwargs)
    if not draws(node) or str(node.target._opname) not in _OPTIONAL:  # type: ignore[union-attr]
        return tuple(args), kwargs
    name, without = _OPTIONAL[str(node.target._opname)][0]  # type: ignore[union-attr]
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    position = names.index(name)
    if position < len(args):
        args[position] = without
    else:
        kwargs[name] = without
    return tuple(args), kwargs


def any_draws(graphs: Iterable[fx.GraphModule | None]) -> bool:
    return any(draws(n) for g in graphs if g is not None for n in g.graph.nodes)
