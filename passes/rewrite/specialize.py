"""Cut a part out of a program with all sizes bound: a static graph of meta tensors.

view(x, [sym_size, sym_size_1, -1, 128])   ->   view(x, [1, 8192, 32, 128])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.marks import REPLICATE
from autopar.op_call import STATIC, Bindings, copies_memory
from autopar.program import Program

# Ops whose second argument is the shape of the result: it is written out.
RESIZING = frozenset({"view", "reshape", "_unsafe_view", "expand", "broadcast_to"})


def cut(
    program: Program,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    bindings: Bindings,
) -> fx.GraphModule:
    """The graph of `nodes` with `inputs` as placeholders (in order) and a tuple of `outputs`.

    Names, module paths and `requires_grad` are kept. Every node is run on the meta device.
    Constants become attributes of the module.
    """
    graph = fx.Graph()
    root = torch.nn.Module()
    made: dict[fx.Node, Any] = {}
    for source in inputs:
        if source.name in program.constants:
            root.register_buffer(source.name, program.constants[source.name], persistent=False)
            node = graph.get_attr(source.name)
        else:
            node = graph.placeholder(source.name)
        node.meta = _kept(source)
        value = source.meta["val"]
        node.meta["val"] = _meta_tensor(value, bindings)
        made[source] = node

    def convert(arg: fx.Node) -> Any:
        if arg in made:
            return made[arg]
        return bindings.size(arg.meta["val"])

    for source in nodes:
        if isinstance(source.meta.get("val"), torch.SymInt | torch.SymFloat | int | float | bool):
            continue
        args, kwargs = fx.map_arg((source.args, source.kwargs), convert)
        args, kwargs = torch.utils._pytree.tree_map(bindings.size, (args, kwargs))
        target: Any = source.target
        node = graph.call_function(target, tuple(args), dict(kwargs))
        node.name = source.name
        node.meta = _kept(source)
        run_on_meta(node)
        if getattr(source.target, "_opname", "") in RESIZING:
            node.update_arg(1, list(node.meta["val"].shape))
        # Decided on the whole tensors: a reshard in between must not change an op's price.
        node.meta["copies"] = copies_memory(node, STATIC)
        made[source] = node
    graph.output(tuple(made[o] for o in outputs))
    return fx.GraphModule(root, graph)


def _kept(node: fx.Node) -> dict[str, Any]:
    keys = (REPLICATE, "nn_module_stack", "stack_trace", "requires_grad")
    return {k: node.meta[k] for k in keys if k in node.meta}


def _meta_tensor(value: torch.Tensor, bindings: Bindings) -> torch.Tensor:
    strides = [bindings.size(s) for s in value.stride()]
    return torch.empty_strided(bindings.shape(value), strides, dtype=value.dtype, device="meta")


def run_on_meta(node: fx.Node) -> None:
    """Compute `meta["val"]` of a node from those of its inputs, on the meta device."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
