"""Sharding candidates: every legal strategy of every op of a block, and its price."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import fx

from autopar.cluster import Device
from autopar.cost.op_cost import CONTRACTIONS, OpCost, op_cost
from autopar.experts import EXCHANGED, EXPERTS
from autopar.experts.operands import spread_arguments
from autopar.marks import REPLICATE
from autopar.op_call import STATIC, OpCall, op_call
from autopar.placement import Placement
from autopar.program import TensorType
from autopar.rules import rule_for
from autopar.rules.language import Rule
from autopar.rules.strategy import Strategy, strategies
from autopar.sequence_shards import ATTENTION_ROWS, rows_arguments


class RuledCall(NamedTuple):
    """An op of a static graph and its rule, if it has one; `replicated` by a mark of the user."""

    call: OpCall
    rule: Rule | None
    replicated: bool


class PricedStrategy(NamedTuple):
    """A strategy that is worth searching, the call as one rank runs it, and its price."""

    strategy: Strategy
    local: OpCall
    cost: OpCost


@dataclass(slots=True)
class Candidates:
    """Per node of a static block graph: the call and its strategies over `ranks` ranks."""

    ranks: int
    calls: dict[str, OpCall]
    strategies: dict[str, list[Strategy]]
    flops: dict[str, float]
    unknown: tuple[str, ...]
    priced: dict[str, list[PricedStrategy]] = field(default_factory=dict)

    def prices(self, node: str, device: Device) -> list[PricedStrategy]:
        """The searched strategies of an op with their prices on `device`, kept."""
        if node not in self.priced:
            call = self.calls[node]
            self.priced[node] = [
                PricedStrategy(s, local, op_cost(local, self.flops[node] * s.share, device))
                for s in searched(call, self.strategies[node])
                for local in (local_call(call, s, self.ranks),)
            ]
        return self.priced[node]


def ruled_calls(
    graph: fx.GraphModule, nodes: Iterable[fx.Node] | None = None
) -> dict[str, RuledCall]:
    """Every op of a static graph (or `nodes` of it) with its rule: the same for any number of
    ranks."""
    found = {}
    for node in graph.graph.nodes if nodes is None else nodes:
        if node.op == "call_function":
            call = op_call(node, STATIC)
            found[node.name] = RuledCall(call, rule_for(call), bool(node.meta.get(REPLICATE)))
    return found


def candidates(
    graph: fx.GraphModule,
    ranks: int,
    known: Mapping[str, RuledCall] | None = None,
    legal_of: Callable[[OpCall, Rule | None], list[Strategy]] | None = None,
) -> Candidates:
    """Strategies of every op of a static graph; ops that no rule covers can only be replicated.

    `known`: the `ruled_calls` of the graph, if the caller has them already. `legal_of`: the
    strategies of a call, if not all that its rule gives.
    """
    found = Candidates(ranks, {}, {}, {}, ())
    unknown: dict[str, None] = {}
    for node, (call, rule, replicated) in (known or ruled_calls(graph)).items():
        if rule is None and call.types and call.results:
            unknown[str(call.target)] = None
        found.calls[node] = call
        legal = legal_of(call, rule) if legal_of else strategies(call, rule, ranks)
        if replicated:
            legal = [s for s in legal if s.name.startswith("replicate")]
        found.strategies[node] = legal
        found.flops[node] = rule.flops if rule else 0.0
    found.unknown = tuple(unknown)
    return found


def local_call(call: OpCall, strategy: Strategy, ranks: int) -> OpCall:
    """The call with the types a rank sees under a strategy."""
    types = tuple(
        local_type(t, p, ranks) for t, p in zip(call.types, strategy.operands, strict=True)
    )
    results = tuple(local_type(t, strategy.result, ranks) for t in call.results)
    if strategy.local_op == EXCHANGED:
        call = replace(call, args=spread_arguments(call.args, ranks))
    if strategy.local_op == ATTENTION_ROWS:
        query, key, value = (call.named(n) for n in ("query", "key", "value"))
        grouped = bool(call.named("enable_gqa"))
        args = rows_arguments(query, key, value, call.named("scale"), grouped, ranks, "cp")
        target = torch.ops.autopar.attention_rows.default
        call = replace(call, target=target, args=args, kwargs={})
    return replace(call, types=types, results=results)


def local_type(kind: TensorType, placement: Placement, ranks: int) -> TensorType:
    """The type of one rank's piece of a value."""
    if not placement.is_shard:
        return kind
    return TensorType(placement.local_shape(kind.shape, ranks), kind.dtype, kind.requires_grad)


def searched(call: OpCall, legal: list[Strategy]) -> list[Strategy]:
    """The strategies worth searching: a product that can be split is not replicated."""
    if call.op_name not in CONTRACTIONS | EXPERTS:
        return legal
    return [s for s in legal if s.name.startswith("shard")] or legal
