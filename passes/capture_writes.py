"""Writes in place that autograd does not see: the values change, the gradient stays as it was.

    with torch.no_grad():            z.detach().clamp_(-1, 1)            z.data.clamp_(-1, 1)
        z.clamp_(-1, 1)

As new values they would cut the gradient of z, or clamp it: refused.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar.errors import CaptureError
from autopar.passes.analysis.aliases import memory_roots, written
from autopar.passes.rewrite.inline_no_grad import runs_without_gradient
from autopar.program import is_differentiable, module_path, tensors_of, user_line

_CUTS = (torch.ops.aten.detach.default, torch.ops.aten.detach_.default)


def refuse_silent_writes(graph: fx.Graph, trained: set[str]) -> None:
    """`trained`: names of the placeholders with a gradient. Into those nothing is written here:
    `refuse_mutation` says more about them."""
    roots = memory_roots(graph)
    with_gradient = {n for n in graph.find_nodes(op="placeholder") if n.name in trained}
    rewritten: set[fx.Node] = set()  # memory into which a value with gradient was written
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        reached = any(n in with_gradient or roots[n] in rewritten for n in node.all_input_nodes)
        if reached and not _cuts(node):
            with_gradient.add(node)
        for changed in written(node):
            root = roots[changed]
            has_gradient = root in rewritten or (root.op != "placeholder" and root in with_gradient)
            seen = changed is root or changed in with_gradient
            if has_gradient and (not seen or runs_without_gradient(node)):
                raise _refused(node, root)
            if node in with_gradient:
                rewritten.add(root)


def _cuts(node: fx.Node) -> bool:
    """Whether the result has no gradient, whatever the operands have."""
    name = str(getattr(node.target, "_opname", ""))
    sized = name.endswith("_like") or name.startswith("new_")  # of an operand, the size counts
    values = tensors_of(node.meta.get("val"))
    whole = not any(is_differentiable(v) for v in values)
    return sized or whole or node.target in _CUTS or runs_without_gradient(node)


def _refused(node: fx.Node, root: fx.Node) -> CaptureError:
    return CaptureError(
        f"module {module_path(node) or module_path(root) or '(root)'!r} writes in place into "
        f"{root.name!r} without its gradient ({user_line(node)})",
        next_step="say what the gradient is: z = z.clamp(...) takes that of the new value, "
        "z = z + (z.clamp(...) - z).detach() leaves that of the old one",
    )
