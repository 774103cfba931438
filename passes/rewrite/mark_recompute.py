"""Mark what runs again in the backward instead of being kept: blocks, or ops of a block.

block model.layers.3   ->   block model.layers.3  # recomputed in the backward
block model.layers.4   ->   block model.layers.4  # runs again in the backward: silu, mul_8
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from autopar.errors import PlanError
from autopar.parts import Parts, Slot
from autopar.passes.analysis.kept_values import KeptValues, kept_values
from autopar.passes.analysis.recompute_frontier import op_names
from autopar.stage_program import Rerun


@dataclass(frozen=True)
class MarkRecompute:
    name: str = "mark-recompute"

    def run(self, parts: Parts) -> Parts:
        kinds = {block.name: block.kind for block in parts.blocks.chain}
        made: dict[tuple[str, str], Rerun | None] = {}
        for stage, planned in zip(parts.stages, parts.decided.stages, strict=True):
            for block in stage.blocks:
                block.recompute = block.name in planned.recompute
                block.rerun = None
                label = planned.selective.get(block.name)
                if label is not None:
                    kind = kinds[block.name]
                    if (kind, label) not in made:
                        made[kind, label] = _planned(parts, kind, label)
                    block.rerun = made[kind, label]
        return parts


def _planned(parts: Parts, kind: str, label: str) -> Rerun | None:
    ops = parts.decided.reruns.get(kind, {}).get(label)
    if ops is None:
        raise PlanError(
            f"no set {label!r} of ops in reruns[{kind!r}]", next_step="name one that is there"
        )
    where = f"reruns[{kind!r}][{label!r}]"
    return rerun(parts.graphs[kind], parts.slots[kind], ops, where)


def rerun(
    graph: fx.GraphModule, slots: tuple[Slot, ...], ops: Sequence[str], where: str
) -> Rerun | None:
    """The nodes of a block's local graph that make the values of `ops` again; None for no ops.

    Raises `PlanError` naming `where` and the op that the block does not have, that may not run
    twice, or that can't run without another that changes the same value in place.
    """
    found = kept_values(graph, slots)
    again = _checked(graph, found, ops, where)
    units = {n for u in found.units for n in u.nodes}
    remade = set(again)
    for node in graph.graph.nodes:
        # What makes no memory of its own looks at what it reads.
        looks = node.op == "call_function" and node not in units
        if looks and any(source in remade for source in node.all_input_nodes):
            remade.add(node)
    views = {n for n in remade - again if _is_read(n, again, remade)}
    chosen = again | views
    read = {source for node in chosen for source in node.all_input_nodes} - chosen
    order = [n for n in graph.graph.nodes if n.op == "call_function"]
    if not again:
        return None
    return Rerun(
        ops=tuple(n.name for n in order if n in again),
        views=tuple(n.name for n in order if n in views),
        sources=tuple(n.name for n in order if n in read),
    )


def _is_read(view: fx.Node, again: set[fx.Node], remade: set[fx.Node]) -> bool:
    """By an op that runs again, perhaps through other views."""
    return any(u in again or (u in remade and _is_read(u, again, remade)) for u in view.users)


def _checked(
    graph: fx.GraphModule, found: KeptValues, ops: Sequence[str], where: str
) -> set[fx.Node]:
    by_name = {name: node for node, name in op_names(graph).items()}
    unit_of = {n: u for u in found.units for n in u.nodes}
    able = [n for n, node in by_name.items() if node in unit_of and not unit_of[node].why_not]
    for name in ops:
        node = by_name.get(name)
        if node is None or node not in unit_of:
            reason = "which the block does not have" if node is None else "which makes no memory"
            raise PlanError(
                f"{where} names the op {name!r}, {reason}",
                next_step=f"ops that can run again are {', '.join(able)}",
            )
        if unit_of[node].why_not:
            raise PlanError(
                f"{where} names the op {name!r}, which can't run twice: {unit_of[node].why_not}",
                next_step="remove it from the set",
            )
        missing = [n for n in by_name if by_name[n] in unit_of[node].nodes and n not in ops]
        if missing:
            raise PlanError(
                f"{where} names the op {name!r} without {missing[0]!r}, which reads or changes the "
                "same memory in place",
                next_step=f"add {', '.join(missing)}, or remove {name}",
            )
    return {by_name[name] for name in ops}
