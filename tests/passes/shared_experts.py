"""A block with experts and a shared one, as a small static graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import autopar.runtime.collectives  # noqa: F401 - registers the ops
from autopar.experts.operands import own_arguments
from autopar.mesh import EP

TOKENS, HIDDEN, INNER, SHARED, EXPERTS, CHOICES = 8, 6, 5, 37, 4, 2
TEXT = "v0 = silu.default(x); v0"
_aten = torch.ops.aten


def shared_experts(
    ranks: int,
    group: str = EP,
    *,
    between: bool = False,
    draws: bool = False,
    twice: bool = False,
) -> fx.GraphModule:
    """As one of `ranks` ranks has it. `between`: the shared expert is written half before and half
    after the others, else after them; `draws`: with a dropout; `twice`: with further experts beside
    the first. All placeholders need gradients but `index`."""
    graph = fx.Graph()
    sizes = {
        "hidden": (TOKENS, HIDDEN),
        "weights": (TOKENS, CHOICES),
        "up": (EXPERTS // ranks, INNER, HIDDEN),
        "down": (EXPERTS // ranks, HIDDEN, INNER),
        "shared_gate": (SHARED, HIDDEN),
        "shared_up": (SHARED, HIDDEN),
        "shared_down": (HIDDEN, SHARED),
        "index": (TOKENS, CHOICES),
    }
    given = {name: _placeholder(graph, name, shape) for name, shape in sizes.items()}
    given["index"].meta["val"] = torch.empty(sizes["index"], dtype=torch.int64, device="meta")
    given["index"].meta["requires_grad"] = False

    def call(name: str, target: Any, *args: Any) -> fx.Node:
        node = graph.create_node("call_function", target, args, {}, name)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        node.meta = {"val": target(*values), "requires_grad": True, "nn_module_stack": {}}
        return node

    def first_half() -> fx.Node:
        gate = call("gate", _aten.linear.default, given["hidden"], given["shared_gate"])
        act = call("act", _aten.silu.default, gate)
        up = call("up_1", _aten.linear.default, given["hidden"], given["shared_up"])
        return call("mul", _aten.mul.Tensor, act, up)

    inside = first_half() if between else None
    doubled = call("doubled", _aten.mul.Tensor, given["hidden"], 2)
    whole = (doubled, given["index"], given["weights"], given["up"], given["down"])
    arguments = (*whole, None, None, None, None, EXPERTS, 0, 1, False, TEXT)
    call(
        "experts",
        torch.ops.autopar.exchanged_experts.default,
        *own_arguments(arguments, ranks, group),
    )
    experts = next(n for n in graph.nodes if n.name == "experts")
    inside = first_half() if inside is None else inside
    if draws:
        inside = call("dropout", _aten.dropout.default, inside, 0.5, True)
    down = call("down_1", _aten.linear.default, inside, given["shared_down"])
    result = call("add", _aten.add.Tensor, experts, down)
    if twice:
        # Neither needs the other; each has a product before it.
        routed = call("routed", _aten.linear.default, given["hidden"], given["shared_gate"])
        again = call("again", _aten.linear.default, routed, given["shared_down"])
        second = call("experts_1", experts.target, again, *experts.args[1:])
        result = call("sum", _aten.add.Tensor, result, second)
    graph.output((result,))
    return fx.GraphModule(torch.nn.Module(), graph)


def _placeholder(graph: fx.Graph, name: str, shape: tuple[int, ...]) -> fx.Node:
    node = graph.placeholder(name)
    node.meta = {"val": torch.empty(shape, device="meta"), "requires_grad": True}
    return node


def names(graph: fx.GraphModule) -> list[str]:
    return [n.name for n in graph.graph.nodes if n.op == "call_function"]
