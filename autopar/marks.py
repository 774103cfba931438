"""What a user says about a module from outside, without editing the model."""

from __future__ import annotations

from typing import TypeVar

from torch import fx, nn

from autopar.program import module_paths

Module = TypeVar("Module", bound=nn.Module)
_MARK = "_autopar_replicate"
REPLICATE = "replicate"


def replicate(module: Module) -> Module:
    """Keep a module whole under tensor parallelism: every tp rank runs all of it, also what it
    calls. Returns the module.

    To the search it is opaque: none of its ops is split, whatever their rules say, its values reach
    it and leave it whole, no collective stands between its ops, and its fused projections stay one
    product. Data and pipeline parallelism, ZeRO and recomputation are not touched. Mark the model
    before it is planned and, on every rank, before it is compiled.
    """
    module.__dict__[_MARK] = True
    return module


def mark_nodes(graph: fx.Graph, model: nn.Module) -> None:
    """Write the marks of the user's modules on the calls that they made."""
    marked = {path for path, module in model.named_modules() if module.__dict__.get(_MARK)}
    if not marked:
        return
    for node in graph.nodes:
        paths = ("" if path.startswith("_empty") else path for path in module_paths(node))
        if node.op == "call_function" and ("" in marked or any(p in marked for p in paths)):
            node.meta[REPLICATE] = True
