"""Replace an attention mask that is causal, whatever the batch, by the kernel's own causal mode.

    sdpa(q, k, v, mask)   ->   sdpa(q, k, v, is_causal=True)

Captured models build their mask from positions. It is computed here for the planned sequence and
compared with the causal one element by element (a long one by the interval of keys that each query
may read), so a window, a prefix or packing is never taken for
causal. Fused causal attention does half the work and needs no mask in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from autopar.op_call import Bindings
from autopar.parts import Parts
from autopar.passes.analysis.aliases import ancestors
from autopar.passes.analysis.mask_intervals import mask_intervals
from autopar.passes.rewrite.simplify import drop_unused
from autopar.passes.rewrite.specialize import cut
from autopar.program import Program

# Beyond this many elements the comparison would take seconds; it is one of intervals then.
LARGEST = 2**28


@dataclass(frozen=True)
class ReplaceCausalMask:
    name: str = "replace-causal-mask"

    def run(self, parts: Parts) -> Parts:
        program = parts.program
        known: dict[fx.Node, bool] = {}
        changed = False
        for node in program.graph.nodes:
            if getattr(node.target, "_opname", "") != "scaled_dot_product_attention":
                continue
            mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
            if not isinstance(mask, fx.Node):
                continue
            if mask not in known:
                known[mask] = is_causal(program, mask, parts.sizes)
            if known[mask]:
                _use_causal_mode(node)
                changed = True
        return parts.evolve(program=drop_unused(program)) if changed else parts


def is_causal(program: Program, mask: fx.Node, sizes: dict[str, int]) -> bool:
    """Whether `mask` is causal for every batch: it depends on sizes alone, and equals that mask."""
    # Sizes of inputs are constants; their contents are not.
    nodes = ancestors(program.graph, [mask], through_sizes=False)
    if any(node.op != "call_function" for node in nodes):
        return False
    bindings = Bindings(
        program.symbols, {**sizes, "batch": 1 if "batch" in program.symbols else sizes["batch"]}
    )
    shape = bindings.shape(mask.meta["val"])
    if len(shape) < 2 or shape[-1] != shape[-2]:
        return False
    size = shape[-1]
    ordered = [n for n in program.graph.nodes if n in nodes]
    graph = cut(program, ordered, [], [mask], bindings)
    for node in graph.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.update_kwarg("device", torch.device("cpu"))
    graph.recompile()
    if prod(shape) > LARGEST:
        found = mask_intervals(graph)
        rows = torch.arange(size)
        return found is not None and not found.start.any() and bool((found.stop == rows + 1).all())
    with torch.no_grad():
        (value,) = graph()
    allowed = value if value.dtype is torch.bool else value == 0
    if value.dtype is not torch.bool and bool(
        (value[~allowed] > torch.finfo(value.dtype).min / 2).any()
    ):
        return False
    return bool((allowed == torch.ones(size, size, dtype=torch.bool).tril()).all())


def _use_causal_mode(node: fx.Node) -> None:
    """Drop the mask; keep dropout and the other arguments."""
    args: list[Any] = list(node.args[:3])
    kwargs = {
        k: v for k, v in node.kwargs.items() if k not in ("attn_mask", "is_causal", "dropout_p")
    }
    dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
    node.args = (*args, None, dropout, True)
    node.kwargs = kwargs
