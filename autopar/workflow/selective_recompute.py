"""What a layer keeps and repeats when only some of its ops are recomputed.

core      Megatron's selective recomputation: scores, softmax and dropout of attention (or the
          fused kernel) run again; what lies between the first and the last of them is not kept.
products  torchtitan's per-op policy: results of attention and of every second matrix product are
          kept, all else runs again from the layer's input.
"""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from autopar.axis import Axis
from autopar.block_cost import BlockCost
from autopar.cost.op_cost import CONTRACTIONS, is_view
from autopar.op_call import STATIC, op_call
from autopar.parts import Slot
from autopar.passes.analysis.block_memory import block_memory
from autopar.passes.analysis.roofline import roofline
from autopar.program import tensors_of

SELECTIVE = ("core", "products")
ATTENTION = "scaled_dot_product_attention"
CORE = frozenset({"softmax", "threshold", "dropout", ATTENTION})


def with_selective_recompute(
    block: BlockCost, graph: fx.GraphModule, slots: tuple[Slot, ...], axis: Axis, policy: str
) -> BlockCost:
    """The price of `block` under `policy`; `graph` is its rewritten graph, one rank's.

    The repeated ops are added to its backward.
    """
    names = {
        n.name: op_call(n, STATIC).op_name for n in graph.graph.nodes if n.op == "call_function"
    }
    again = _core(graph, names) if policy == "core" else _all_but_products(graph, names)
    # Of experts whose rows travel there are two prices: of the op, and of its messages.
    priced, wanted = roofline(graph, axis), set(again)
    extra = sum(p.cost.forward_seconds for p in priced if p.node in wanted)
    if policy == "core":
        freed = _bytes(graph, [n for n in again if names[n] in CORE and names[n] != ATTENTION])
        kept = block.saved_bytes - freed
    else:
        results = [n for n in names if n not in again and not _free(graph, n)]
        kept = block_memory(graph, slots).inputs + _bytes(graph, results)
    return replace(
        block,
        backward_compute=block.backward_compute + extra,
        saved_bytes=min(block.saved_bytes, kept),
        transient_bytes=block.transient_bytes + max(0, block.saved_bytes - kept),
        reduced_transient_bytes=block.reduced_transient_bytes + max(0, block.saved_bytes - kept),
    )


def without_gathered(block: BlockCost, graph: fx.GraphModule, tp: int) -> BlockCost:
    """The price of `block` when inputs of products that were gathered over tp are kept split and
    gathered again in the backward. The second gather hides behind the products (Korthikanti et al.
    2022, section 4.2.2) and is not priced."""
    gathered = sum(
        t.nbytes
        for n in graph.graph.nodes
        if "reshard" in n.meta and n.meta["reshard"].forward == "all_gather"
        for t in tensors_of(n.meta["val"])
    )
    freed = gathered - gathered // tp
    return replace(
        block,
        saved_bytes=max(block.input_bytes, block.saved_bytes - freed),
        transient_bytes=block.transient_bytes + min(freed, gathered // 2),
        reduced_transient_bytes=block.reduced_transient_bytes + min(freed, gathered // 2),
    )


def _core(graph: fx.GraphModule, names: dict[str, str]) -> list[str]:
    """Attention's inner ops: from the product before the softmax to that after it."""
    found = [n for n, op in names.items() if op in CORE]
    for node in graph.graph.nodes:
        if node.name in names and names[node.name] == "softmax":
            before = [p.name for p in node.all_input_nodes]
            found += [n for n in before if names.get(n) in CONTRACTIONS]
        if names.get(node.name) in CONTRACTIONS and any(
            names.get(p.name) in ("threshold", "dropout", "softmax") for p in node.all_input_nodes
        ):
            found.append(node.name)
    return found


def _all_but_products(graph: fx.GraphModule, names: dict[str, str]) -> list[str]:
    """Every op except attention and the first, third, fifth ... product."""
    again, count = [], 0
    for node in graph.graph.nodes:
        op = names.get(node.name)
        if op is None or op == ATTENTION:
            continue
        if op in CONTRACTIONS:
            count += 1
            if count % 2:
                continue
        again.append(node.name)
    return again


def _free(graph: fx.GraphModule, name: str) -> bool:
    """The node makes no tensor of its own, or is a collective (recomputed with its product)."""
    node = next(n for n in graph.graph.nodes if n.name == name)
    return "reshard" in node.meta or is_view(op_call(node, STATIC))


def _bytes(graph: fx.GraphModule, names: list[str]) -> int:
    wanted = set(names)
    return sum(
        t.nbytes for n in graph.graph.nodes if n.name in wanted for t in tensors_of(n.meta["val"])
    )
