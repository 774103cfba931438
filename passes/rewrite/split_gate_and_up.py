"""Split the parameter in which experts hold gate and up into two operands.

experts(x, ..., gate_up[e, 2 i, h], ...)   ->   experts(x, ..., up, ..., gate=gate_up[:, 0:i])
                                                     with up = gate_up[:, i:2 i]

An even shard of the columns of both would hold no column of up beside its gate's. Only where the
function between the projections tells the two apart by halves; a layout that interleaves them is
sharded as it is. The user's model keeps its parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from autopar.experts.activation import is_columnwise
from autopar.experts.operands import is_expert_call
from autopar.marks import REPLICATE
from autopar.parts import Parts
from autopar.passes.rewrite.simplify import drop_unused
from autopar.passes.rewrite.split_fused import piece_of
from autopar.program import GraphInput, Program, copy_graph

# Positions in the call: what holds both -> where the gate goes.
_UP, _DOWN, _GATE, _UP_BIAS, _GATE_BIAS = 3, 4, 5, 6, 7


@dataclass(frozen=True)
class SplitGateAndUp:
    name: str = "split-gate-and-up"

    def run(self, parts: Parts) -> Parts:
        program = parts.program
        found = [n.name for n in program.graph.nodes if _holds_both(n, program)]
        if not found:
            return parts
        program = program.with_graph(copy_graph(program.graph_module))
        nodes = {n.name: n for n in program.graph.nodes}
        pieces: dict[str, list[GraphInput]] = {}
        for name in found:
            _split(program, nodes[name], pieces)
        # The whole parameters are still there, unread: `drop_unused` takes them out.
        inputs = [p for item in program.inputs for p in (*pieces.get(item.name, ()), item)]
        program.graph_module.recompile()
        changed = program.with_graph(program.graph_module, inputs=tuple(inputs))
        return parts.evolve(program=drop_unused(changed))


def _holds_both(node: fx.Node, program: Program) -> bool:
    if not is_expert_call(node) or node.meta.get(REPLICATE):
        return False
    up, gate, bias = (node.args[i] for i in (_UP, _GATE, _UP_BIAS))
    if not isinstance(up, fx.Node) or gate is not None or _width(node) != 2 * _inner(node):
        return False
    kinds = {i.name: i.kind for i in program.inputs}
    alone = (
        kinds.get(o.name) == "parameter" and len(o.users) == 1
        for o in (up, bias)
        if isinstance(o, fx.Node)
    )
    text = str(node.args[-1])
    return all(alone) and is_columnwise(text, 2) and not is_columnwise(text, 1)


def _width(node: fx.Node) -> int:
    return int(_value(node, _UP).shape[_columns(node)])


def _inner(node: fx.Node) -> int:
    return int(_value(node, _DOWN).shape[1 if _columns(node) == 2 else 2])


def _columns(node: fx.Node) -> int:
    """The dim of `up` that holds the columns."""
    return 2 if node.args[-2] else 1


def _value(node: fx.Node, position: int) -> Any:
    operand = node.args[position]
    assert isinstance(operand, fx.Node)
    return operand.meta["val"]


def _split(program: Program, node: fx.Node, pieces: dict[str, list[GraphInput]]) -> None:
    inner = _inner(node)
    for whole_at, gate_at, dim in ((_UP, _GATE, _columns(node)), (_UP_BIAS, _GATE_BIAS, 1)):
        whole = node.args[whole_at]
        if isinstance(whole, fx.Node):
            gate = piece_of(program, whole, dim, (0, inner), pieces)
            up = piece_of(program, whole, dim, (inner, 2 * inner), pieces)
            node.update_arg(gate_at, gate)
            node.update_arg(whole_at, up)
