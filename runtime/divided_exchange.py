"""An exchange of experts' rows in four steps, with what runs beside it between them.

    up = linear(x, w_up)  # queued                  announced = announce(x, index, weights, …)
    act = silu(up)        # there                   up = linear(x, w_up)
    experts = exchanged_experts(x, index, …)   ->   dispatched = dispatch(announced)
    down = linear(act, w_down)  # back              act = silu(up)
                                                    processed = process(dispatched, …)
                                                    down = linear(act, w_down)
                                                    experts = collect(processed, index)

Autograd runs the backwards of what is ready in the opposite order, so gradients travel beside the
same ops.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.experts import BESIDE, EXCHANGED, QUEUED, WAY_BACK
from autopar.experts.exchange import Announced, announce, collect, dispatch, process
from autopar.experts.operands import TENSORS, UP
from autopar.runtime.torch_compat import resolve_group
from autopar.stage_program import Rerun

Tensor = torch.Tensor


def divided(graph: fx.Graph, rerun: Rerun | None) -> Rerun | None:
    """Edit a block's graph in place: every exchange beside which other ops run becomes four nodes,
    the last of which has its name. All of them run again in the backward where it does."""
    for call in list(graph.nodes):
        if getattr(call.target, "_opname", "") != EXCHANGED:
            continue
        marked = [n for n in graph.nodes if n.meta.get(BESIDE, ("",))[0] == call.name]
        if marked:
            rerun = _with_steps(rerun, call.name, _divide(graph, call, marked))
    return rerun


def _divide(graph: fx.Graph, call: fx.Node, marked: list[fx.Node]) -> tuple[str, ...]:
    """The names of the steps before the last. `marked`: what runs beside the call, around it."""
    there = [n for n in marked if n.meta[BESIDE][1] != WAY_BACK]
    queued = [n for n in there if n.meta[BESIDE][1] == QUEUED]
    back = [n for n in marked if n not in there]
    name, arguments = call.name, call.args
    for node in _between(there[0], call) if there else ():
        if node not in there:  # what choices go through to become slots
            there[0].prepend(node)
    after_queued = next((n for n in there if n not in queued), call)
    hidden, index, weights, *held = arguments[:TENSORS]
    experts, transposed, activation, ranks, group = arguments[TENSORS:]
    given: tuple[Any, ...] = (hidden, index, weights, arguments[UP], experts, ranks, group)
    announced = _before(there[0] if there else call, announce_rows, given, f"{name}_announced")
    dispatched = _before(after_queued, dispatch, (announced,), f"{name}_dispatched")
    given = (dispatched, *held, transposed, activation)
    processed = _before(call, process, given, f"{name}_processed")
    call.target, call.args = collect, (processed, index)
    if back:
        back[-1].append(call)
    return announced.name, dispatched.name, processed.name


def _before(node: fx.Node, step: Any, arguments: tuple[Any, ...], name: str) -> fx.Node:
    with node.graph.inserting_before(node):
        return node.graph.create_node("call_function", step, arguments, {}, name)


def announce_rows(
    hidden: Tensor, index: Tensor, weights: Tensor, up: Tensor, experts: int, ranks: int, group: str
) -> Announced:
    """`announce` in the process group of that name."""
    # On meta there is no group yet.
    process_group: Any = None if hidden.is_meta else resolve_group(group)
    return announce(hidden, index, weights, up, experts, ranks, process_group)


def _between(first: fx.Node, last: fx.Node) -> list[fx.Node]:
    found, node = [], first.next
    while node is not last:
        found.append(node)
        node = node.next
    return found


def _with_steps(rerun: Rerun | None, call: str, steps: tuple[str, ...]) -> Rerun | None:
    if rerun is None or call not in rerun.ops:
        return rerun
    at = rerun.ops.index(call)
    return replace(rerun, ops=(*rerun.ops[:at], *steps, *rerun.ops[at:]))
