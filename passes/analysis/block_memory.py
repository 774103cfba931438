"""What one block keeps for its backward, and the most it needs for a moment, in bytes on one rank.

The block's local graph is run on the meta device under autograd: the saved tensors are autograd's
own, and views share memory as they do when executed. Only fused attention is replaced by an op
that keeps what the fused kernels keep (on meta it would take the unfused path).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.cost.experts import assumed_imbalance
from autopar.cost.op_cost import VIEWS
from autopar.experts.assumed_rows import imbalance
from autopar.op_call import STATIC, op_call
from autopar.parts import Slot
from autopar.passes.analysis.delayed_gradients import DividedBackward, divided_backward
from autopar.passes.analysis.workspace import backward_workspace, forward_workspace
from autopar.program import tensors_of
from autopar.sequence_shards import ATTENTION, ATTENTIONS


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """`saved`: kept from forward to backward, the block's inputs included when an op keeps them
    (`saved_inputs`), without parameters and shared values; `released`: the part that is given back
    before the fullest moment. `inputs`: kept when the block is recomputed. `transient`:
    at the worst moment on top of `saved`, with the gradient of a parameter that is being made;
    `reduced_transient`: with the gradients of all parameters that were made so far, `made` of it;
    `forward_transient`: in the forward. `fleeting`: the most in a forward that keeps nothing, as
    of a block that is recomputed, beside its inputs.
    `shared`: parameter-free values read from outside; `shared_kept`: those of them that ops keep.
    `divided`: of a divided backward."""

    saved: int
    saved_inputs: int
    released: int
    inputs: int
    transient: int
    forward_transient: int
    fleeting: int
    reduced_transient: int
    made: int
    shared: int
    shared_kept: int
    per_node: dict[str, int]
    divided: DividedBackward


class _FusedAttention(torch.autograd.Function):
    """Shapes and saved tensors of a fused attention kernel; computes nothing (for meta tensors)."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any
    ) -> torch.Tensor:
        # Fused kernels write [b, s, h, d] and hand out the transpose.
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]).transpose(1, 2)
        rows = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        kept = [q, k, v, out, rows]
        if mask is not None:
            kept.append(mask.to(q.dtype) if mask.dtype is torch.bool else mask)
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise AssertionError("never run")


@dataclass(frozen=True, slots=True)
class _Given:
    """What a block is given, on meta. Bytes by storage: of values that it has gradients for
    (`received`), of others (`shared`). `outside`: the storages of all but the first."""

    values: dict[fx.Node, Any]
    outside: set[int]
    received: dict[int, int]
    shared: dict[int, int]

    @staticmethod
    def of(graph: fx.GraphModule, slots: tuple[Slot, ...]) -> _Given:
        found = _Given({}, set(), {}, {})
        placeholders = graph.graph.find_nodes(op="placeholder")
        for node, slot in zip(placeholders, slots, strict=True):
            trained = bool(node.meta.get("requires_grad"))
            leaf = torch.empty_like(node.meta["val"]).requires_grad_(trained)
            found.values[node] = leaf
            if slot.kind != "value" or not trained:
                found.outside.add(_key(leaf))
            if slot.kind == "value":
                kind = found.received if trained else found.shared
                kind[_key(leaf)] = leaf.untyped_storage().nbytes()
        for node in graph.graph.find_nodes(op="get_attr"):
            found.values[node] = torch.empty_like(node.meta["val"])
            found.outside.add(_key(found.values[node]))
        return found


def block_memory(
    graph: fx.GraphModule, slots: tuple[Slot, ...], room: Mapping[fx.Node, int] | None = None
) -> BlockMemory:
    """Account for a local block graph, run on meta. `room`: elements of gradients beyond these."""
    owned: dict[int, int] = {}
    given = _Given.of(graph, slots)
    values, outside, shared = given.values, given.outside, given.shared
    shared_kept: dict[int, int] = {}
    saved_at: dict[fx.Node, list[int]] = {}
    current: list[int] = []
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = _key(tensor)
        if key not in outside:
            alive.append(tensor)
            owned[key] = tensor.untyped_storage().nbytes()
            current.append(key)
        elif key in shared:
            shared_kept[key] = shared[key]
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        for node in graph.graph.nodes:
            if node.op == "call_function":
                current = []
                values[node] = call_on_meta(node, values)
                saved_at[node] = current
    saved = sum(owned.values())
    forward = _forward_peak(graph, values, owned, saved_at, outside)
    placeholders = graph.graph.find_nodes(op="placeholder")
    gradients = _gradient_bytes(zip(placeholders, slots, strict=True), room or {})
    backward, reduced, released, made = _backward_peaks(graph, values, owned, saved_at, gradients)
    per_node = {n.name: sum(owned[k] for k in set(keys)) for n, keys in saved_at.items()}
    return BlockMemory(
        saved,
        sum(size for key, size in owned.items() if key in given.received),
        released if reduced >= forward else 0,
        sum(given.received.values()),
        max(0, forward - saved, backward - saved),
        max(0, forward - saved),
        _forward_peak(graph, values, {}, {}, outside),
        max(0, forward - saved, reduced - saved),
        made if reduced >= forward else 0,
        sum(shared.values()),
        sum(shared_kept.values()),
        per_node,
        divided_backward(graph, values, gradients, saved_at, owned),
    )


def _gradient_bytes(
    inputs: Iterable[tuple[fx.Node, Slot]], room: Mapping[fx.Node, int]
) -> dict[fx.Node, int]:
    """Of every parameter."""
    kinds = {node: node.meta["val"] for node, slot in inputs if slot.kind == "parameter"}
    return {n: v.nbytes + room.get(n, 0) * v.element_size() for n, v in kinds.items()}


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def call_on_meta(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """One node of a graph on meta tensors; fused attention keeps what its kernels keep."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
    name = getattr(node.target, "_opname", "")
    if name in ATTENTIONS:
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        mask = mask if name == ATTENTION else None
        return _FusedAttention.apply(args[0], args[1], args[2], mask)  # type: ignore[no-untyped-call]
    assumed = "expert_load" in node.meta
    with imbalance(assumed_imbalance(op_call(node, STATIC)) if assumed else 1.0):
        return node.target(*args, **kwargs)  # type: ignore[operator]


def _storages(value: Any) -> dict[int, int]:
    return {_key(t): t.untyped_storage().nbytes() for t in tensors_of(value)}


def _forward_peak(
    graph: fx.GraphModule,
    values: dict[fx.Node, Any],
    owned: Mapping[int, int],
    saved_at: Mapping[fx.Node, list[int]],
    outside: set[int],
) -> int:
    """Most bytes alive at once in the forward: what is saved so far or still to be read."""
    readers: Counter[int] = Counter()
    for node in graph.graph.nodes:
        for source in node.all_input_nodes:
            readers.update(_storages(values[source]).keys() if source in values else ())
    live: dict[int, int] = {}
    peak = 0
    for node in graph.graph.nodes:
        if node.op == "call_function":
            live.update({k: s for k, s in _storages(values[node]).items() if k not in outside})
            live.update({k: owned[k] for k in owned if k in live})
            # What an op keeps that is neither its operand nor its result.
            live.update({k: owned[k] for k in saved_at.get(node, ()) if k in owned})
            peak = max(peak, sum(live.values()) + forward_workspace(node))
            for source in node.all_input_nodes:
                for key in _storages(values[source]):
                    readers[key] -= 1
                    if readers[key] <= 0 and key not in owned:
                        live.pop(key, None)
    return peak


def _backward_peaks(
    graph: fx.GraphModule,
    values: dict[fx.Node, Any],
    owned: dict[int, int],
    saved_at: dict[fx.Node, list[int]],
    parameters: Mapping[fx.Node, int],
) -> tuple[int, int, int, int]:
    """Most bytes alive at once in the backward: what is still saved, gradients of values, and of
    the parameters that an op reads; the same with gradients of all parameters so far; and what was
    saved and is given back, and these gradients, at the second of these moments. `parameters`:
    bytes of the gradient of each.
    """
    holders: Counter[int] = Counter()
    for keys in saved_at.values():
        holders.update(set(keys))
    saved = remaining = sum(owned.values())
    released = made_then = 0
    grads: dict[fx.Node, int] = {}
    peak = peak_of_all = remaining
    made: dict[fx.Node, int] = {}
    for node in reversed(list(graph.graph.nodes)):
        if node.op != "call_function" or not node.meta.get("requires_grad"):
            continue
        own = grads.pop(node, None)
        if own is None:
            own = sum(t.nbytes for t in tensors_of(values[node]))
        view = getattr(node.target, "_opname", "") in VIEWS
        fresh = 0
        for source in node.all_input_nodes:
            if source.meta.get("requires_grad"):
                if source in grads:
                    continue
                if source in parameters:
                    made[source] = parameters[source]
                    fresh += made[source]
                    continue
                size = sum(t.nbytes for t in tensors_of(values[source]))
                grads[source] = own if view else size
        now = remaining + sum(grads.values()) + (0 if view else own) + backward_workspace(node)
        peak = max(peak, now + (0 if view else fresh))
        if now + sum(made.values()) > peak_of_all:
            made_then = sum(made.values())
            peak_of_all, released = now + made_then, saved - remaining
        for key in set(saved_at[node]):
            holders[key] -= 1
            if not holders[key]:
                remaining -= owned[key]
    return peak, peak_of_all, released, made_then
