"""Which ops draw random numbers."""

from __future__ import annotations

from collections.abc import Iterable

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


def any_draws(graphs: Iterable[fx.GraphModule | None]) -> bool:
    return any(draws(n) for g in graphs if g is not None for n in g.graph.nodes)
