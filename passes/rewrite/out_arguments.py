"""An op that writes its result into `out=` becomes the op and a copy into that memory.

    div(a, b, out=u)   ->   new = div(a, b);  copy_(u, new)

`functionalize` then treats the copy as any other write in place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten


def replace_out_arguments(graph: fx.Graph) -> None:
    """Rewrite every op with one `out` whose form without it is known."""
    for node in list(graph.nodes):
        form = _without_out(node.target)
        if form is None:
            continue
        name, target = form
        out = node.kwargs.get(name)
        if not isinstance(out, fx.Node):
            continue
        others = {k: v for k, v in node.kwargs.items() if k != name}
        with graph.inserting_before(node):
            made = graph.call_function(target, node.args, others)
            made.meta = dict(node.meta)
            values = fx.map_arg((node.args, others), lambda n: n.meta["val"])
            made.meta["val"] = target(*values[0], **values[1])
            copied = graph.call_function(aten.copy_.default, (out, made))
            copied.meta = dict(node.meta)
        node.replace_all_uses_with(copied)
        graph.erase_node(node)


def _without_out(target: Any) -> tuple[str, Any] | None:
    """Name of the single out argument of an overload, and the overload that lacks just that."""
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return None
    outs = [a.name for a in target._schema.arguments if a.is_out]
    if len(outs) != 1 or len(target._schema.returns) != 1:
        return None
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if not a.is_out]
    packet = getattr(aten, target._opname)
    for name in packet.overloads():
        other = getattr(packet, name)
        if [(a.name, str(a.type)) for a in other._schema.arguments] == wanted:
            return outs[0], other
    return None
