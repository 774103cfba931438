"""Tell the experts of a block which load prices assume: that of every layer of its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from autopar.passes.rewrite.split_experts import expert_calls
from autopar.program import module_path

Shares = tuple[float, ...]


def annotate_load(
    graph: fx.GraphModule, kind: str, blocks: Sequence[str], load: Mapping[str, Shares]
) -> None:
    """Record shares by layer in the metadata of nodes, where op calls take them from. `blocks`: of
    a kind, which is named by the first; layers without a load are even."""
    for node in expert_calls(graph):
        path = module_path(node)
        inside = path.removeprefix(kind)
        layers = [block + inside for block in blocks] if path.startswith(kind) else [path]
        known = [load[name] for name in layers if name in load]
        if known:
            even = (1 / len(known[0]),) * len(known[0])
            node.meta["expert_load"] = tuple(load.get(name, even) for name in layers)
