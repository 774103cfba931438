"""What a legal program is, checked after every pass.

- a graph is well formed, and every placed value has the local shape that its placement says;
- every op reads each operand in the placement its strategy asks for;
- no partial sum leaves a block, and values with gradient leave it in the boundary placement;
- tensor-parallel collectives are the same ops in the same order on all ranks: one graph serves all,
  so it is enough that nothing in it depends on the rank;
- every value that a stage reads is made before it, received, or shared; sent is what is received.
"""

from __future__ import annotations

from torch import fx

from autopar.errors import PassError
from autopar.parts import Parts
from autopar.passes.rewrite.insert_collectives import operands_of
from autopar.placement import Placement
from autopar.program import outputs_of, tensors_of
from autopar.reshard import reshard

# After these passes nothing is placed and brought together yet.
_UNPLACED = ("cut-blocks", "split-sequence", "split-experts", "place")


def verify(parts: Parts, after: str) -> None:
    """Raises `PassError` naming the pass, the node and the broken invariant."""
    for kind, graph in parts.graphs.items():
        graph.graph.lint()
        localised = after not in (*_UNPLACED, "insert-collectives")
        if after in _UNPLACED:
            continue
        for node in graph.graph.nodes:
            _check_operands(node, kind, after)
            if localised and parts.decided.mesh.tp > 1:
                _check_shape(node, kind, after, parts.decided.mesh.tp)
        _check_outputs(graph, kind, after, Placement.parse(parts.decided.boundary))
    if parts.stages:
        _check_stages(parts, after)


def _fail(after: str, what: str) -> None:
    raise PassError(
        f"after {after}: {what}", next_step="this is a fault of that pass; please report it"
    )


def _check_operands(node: fx.Node, kind: str, after: str) -> None:
    edge = node.meta.get("reshard")
    if edge is not None:
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        given, made = source.meta["placement"], node.meta["placement"]
        expected = node.meta["source_placement"]
        if given != expected:
            _fail(
                after, f"block {kind}: {node.name} reads {source.name} as {expected}, it is {given}"
            )
        if reshard(given, made, requires_grad=bool(source.meta.get("requires_grad"))) != edge:
            _fail(after, f"block {kind}: {node.name} does not turn {given} into {made}")
    strategy = node.meta.get("strategy")
    if strategy is None:
        return
    for source, wanted in zip(operands_of(node), strategy.operands, strict=True):
        have: Placement = source.meta["placement"]
        grad = bool(source.meta.get("requires_grad"))
        same = have == wanted or (not grad and have.is_whole and wanted.is_whole)
        if not same:
            _fail(after, f"block {kind}: {node.name} reads {source.name} as {wanted}, it is {have}")


def _check_shape(node: fx.Node, kind: str, after: str, ranks: int) -> None:
    whole = node.meta.get("global_shape")
    values = tensors_of(node.meta.get("val"))
    if whole is None or not values:
        return
    expected = node.meta["placement"].local_shape(whole, ranks)
    if tuple(values[0].shape) != expected:
        _fail(after, f"block {kind}: {node.name} is {tuple(values[0].shape)}, should be {expected}")


def _check_outputs(graph: fx.GraphModule, kind: str, after: str, boundary: Placement) -> None:
    for value in outputs_of(graph.graph):
        have: Placement = value.meta["placement"]
        grad = bool(value.meta.get("requires_grad"))
        scalar = not value.meta["val"].dim()
        allowed = have.kind == "R" if scalar or not grad else have == boundary
        if not allowed:
            _fail(after, f"block {kind} hands out {value} as {have}, not {boundary}")


def _check_stages(parts: Parts, after: str) -> None:
    sent: tuple[str, ...] = ()
    for stage in parts.stages:
        received = tuple(v.name for v in stage.receive)
        if received != sent:
            _fail(after, f"stage {stage.index} receives {received}, the one before sends {sent}")
        known = {*received, *stage.shared_outputs}
        for block in stage.blocks:
            missing = [n for n in block.inputs if n not in known]
            if missing:
                _fail(after, f"block {block.name} reads {missing[0]}, which nothing has made")
            known |= set(block.outputs)
        sent = tuple(v.name for v in stage.send)
        lost = [n for n in sent if n not in known]
        if lost:
            _fail(after, f"stage {stage.index} sends {lost[0]}, which it does not have")
    if parts.stages[-1].loss not in known:
        _fail(after, "the last stage does not compute the loss")
