"""The graph of a block with experts as it runs: choices are handed out to be counted, and become
slots where experts were moved or there is room for more.

    getitem_1 = topk[1]                            getitem_1 = topk[1]
    experts = own_experts(hidden, getitem_1, …)    slots = slot_of_0[getitem_1]
    return (add,)                                  experts = own_experts(hidden, slots, …)
                                                   return (add, getitem_1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from autopar.experts import capacity
from autopar.experts.operands import is_expert_call
from autopar.mesh import EP
from autopar.runtime import slots_in_turn  # noqa: F401 - registers the op
from autopar.runtime.divided_exchange import divided
from autopar.runtime.expert_load import LayerExperts
from autopar.runtime.slot_order import slots_by_expert
from autopar.stage_program import BlockProgram, Rerun

Tensor = torch.Tensor
# Places of operands in every form of the op, see `autopar.experts.operands`.
_INDEX, _WEIGHTS, _COUNT, _OWN_RANKS = 1, slice(3, 9), 9, 12


@dataclass(frozen=True)
class ExpertBlock:
    """`graph` returns one index per layer with experts behind the results of the block's."""

    graph: fx.GraphModule
    rerun: Rerun | None
    layers: tuple[LayerExperts, ...]

    @staticmethod
    def of(block: BlockProgram) -> ExpertBlock:
        """A block without experts keeps its graph."""
        layers = tuple(_layer(node, block, place) for place, node in enumerate(_calls(block)))
        return _built(block, layers, {})

    def placed(self, block: BlockProgram, device: torch.device) -> ExpertBlock:
        """The graph for the present `order` of each layer."""
        tables = {
            place: SlotTable.of(layer, device)
            for place, layer in enumerate(self.layers)
            if layer.order
        }
        return _built(block, self.layers, tables)

    def count(self, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Take the indices off the outputs of `graph`, and add them to the layers' counts."""
        if not self.layers:
            return outputs
        results = len(outputs) - len(self.layers)
        for layer, index in zip(self.layers, outputs[results:], strict=True):
            layer.add(index)
        return outputs[:results]


@dataclass(frozen=True)
class SlotTable:
    """`slots[e, c]` of a number that the router may choose, `copies[e]` of them; of `count` numbers
    that the op is to know."""

    slots: Tensor
    copies: Tensor
    count: int
    most: int

    @staticmethod
    def of(layer: LayerExperts, device: torch.device) -> SlotTable:
        by_expert = slots_by_expert(layer.order)
        if layer.limited:
            by_expert.append([len(layer.order)])  # what is dropped is behind all slots
        most = max(map(len, by_expert))
        padded = [each + each[:1] * (most - len(each)) for each in by_expert]
        return SlotTable(
            torch.tensor(padded, device=device),
            torch.tensor([len(each) for each in by_expert], device=device),
            len(layer.order) + layer.limited,
            most,
        )


def _calls(block: BlockProgram) -> list[fx.Node]:
    return [node for node in block.graph.graph.nodes if is_expert_call(node)]


def _layer(node: fx.Node, block: BlockProgram, place: int) -> LayerExperts:
    strategy = node.meta.get("strategy")
    split = bool(strategy is not None and strategy.operands[_INDEX].is_shard)
    target: Any = node.target
    arguments: tuple[Any, ...] = node.args
    ranks = 1 if target._opname == "experts" else int(arguments[_OWN_RANKS])
    sources = [_parameter(a, block) for a in arguments[_WEIGHTS] if a is not None]
    names = {source.rpartition(".")[0] for source, _ in sources if source}
    alone = all(source and alone for source, alone in sources)
    # The module of the experts, or the block when it is no single one.
    name = names.pop() if len(names) == 1 else f"{block.name}.{place}" if place else block.name
    parameters = tuple(source for source, _ in sources) if alone else ()
    axis = EP if any(source in block.over_ep for source, _ in sources) else "tp"
    limited = _limited(node)
    experts = int(arguments[_COUNT]) - limited
    spare = min((block.spare.get(source, 0) for source in parameters), default=0)
    return LayerExperts(
        *(name, experts, split, ranks, parameters), axis=axis, limited=limited, spare=spare
    )


def _limited(node: fx.Node) -> bool:
    """Whether choices of a call may be dropped: collectives may follow the op that does it."""
    source: fx.Node | None = _index(node)
    while source is not None and source.op == "call_function":
        if getattr(source.target, "_opname", "") == capacity.OP:
            return True
        inputs = source.all_input_nodes
        source = inputs[0] if len(inputs) == 1 else None
    return False


def _parameter(source: Any, block: BlockProgram) -> tuple[str, bool]:
    """The parameter that an operand comes from, '' for none; whether no other op reads it."""
    alone = True
    while isinstance(source, fx.Node):
        alone = alone and len(source.users) == 1
        if source.op == "placeholder":
            break
        inputs = source.all_input_nodes
        source = inputs[0] if len(inputs) == 1 else None
    placeholders = list(block.graph.graph.find_nodes(op="placeholder"))[: len(block.parameters)]
    if source not in placeholders:
        return "", False
    return block.parameters[placeholders.index(source)], alone


def _built(
    block: BlockProgram, layers: Sequence[LayerExperts], tables: dict[int, SlotTable]
) -> ExpertBlock:
    """`tables[place]`: slots by expert of the layer at that place."""
    if not layers:
        return ExpertBlock(block.graph, block.rerun, ())
    calls = _calls(block)
    rerun = block.rerun
    root = {
        str(node.target): attrgetter(str(node.target))(block.graph)
        for node in block.graph.graph.find_nodes(op="get_attr")
    }
    made = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in block.graph.graph.nodes:
        if node.op == "output":
            results = fx.map_arg(node.args[0], values.__getitem__)
            made.output((*results, *(values[_index(call)] for call in calls)))
            continue
        # With its name, by which a part of the block is chosen to run again.
        values[node] = made.node_copy(node, values.__getitem__)
        assert values[node].name == node.name
    for place, table in tables.items():
        call = values[calls[place]]
        with made.inserting_before(call):
            index = _to_slots(made, root, values[_index(calls[place])], place, table, layers[place])
        call.update_arg(_INDEX, index)
        call.update_arg(_COUNT, table.count)
        rerun = _with_slots(rerun, call.name, index.name)
    rerun = divided(made, rerun)
    return ExpertBlock(fx.GraphModule(root, made), rerun, tuple(layers))


def _to_slots(
    made: fx.Graph,
    root: dict[str, Any],
    index: fx.Node,
    place: int,
    table: SlotTable,
    layer: LayerExperts,
) -> fx.Node:
    """The slots of the choices `index`."""
    name = f"slot_of_{place}"
    if table.most == 1:
        root[name] = table.slots.squeeze(1)
        return made.call_function(torch.ops.aten.index.Tensor, (made.get_attr(name), [index]))
    root[name], root[f"copies_{place}"] = table.slots, table.copies
    slots, copies = made.get_attr(name), made.get_attr(f"copies_{place}")
    target: Any = torch.ops.autopar.slots_in_turn.default
    return made.call_function(target, (index, slots, copies, layer.turn))


def _index(call: fx.Node) -> fx.Node:
    index = call.args[_INDEX]
    assert isinstance(index, fx.Node)
    return index


def _with_slots(rerun: Rerun | None, call: str, slots: str) -> Rerun | None:
    """What runs the experts again needs their slots again, right before."""
    if rerun is None or call not in rerun.ops:
        return rerun
    at = rerun.ops.index(call)
    return replace(rerun, ops=(*rerun.ops[:at], slots, *rerun.ops[at:]))
