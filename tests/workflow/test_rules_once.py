"""Rules and strategies are worked out once per distinct block, however many layers there are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.cluster import Cluster
from autopar.op_call import OpCall
from autopar.passes.analysis import candidates
from autopar.passes.capture import capture
from autopar.rules import rule_for
from autopar.rules.language import Rule
from autopar.rules.strategy import Strategy, strategies
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.prepare import prepare

DEGREES = (2, 4, 8)


class Tower(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        layer = [nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)]
        self.layers = nn.ModuleList(
            nn.Sequential(*(type(m)(*_arguments(m)) for m in layer)) for _ in range(layers)
        )
        self.head = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()


def _arguments(module: nn.Module) -> tuple[int, ...]:
    if isinstance(module, nn.Linear):
        return module.in_features, module.out_features
    return module.normalized_shape if isinstance(module, nn.LayerNorm) else ()


def analysed(layers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Ops of the graph, and calls of rules and of strategies to price it for tp 2, 4 and 8."""
    counts = {"rules": 0, "strategies": 0}

    def counted_rule(op: OpCall) -> Rule | None:
        counts["rules"] += 1
        return rule_for(op)

    def counted_strategies(op: OpCall, rule: Rule | None, ranks: int) -> list[Strategy]:
        counts["strategies"] += 1
        return strategies(op, rule, ranks)

    program = capture(Tower(layers), {"x": torch.randn(4, 16)})
    program = prepare(program, program.sizes)
    monkeypatch.setattr(candidates, "rule_for", counted_rule)
    monkeypatch.setattr(candidates, "strategies", counted_strategies)
    costs = ModelCosts(program, Cluster.parse("h100:1x8"), program.sizes)
    for tp in DEGREES:
        for kind in costs.kinds.at(1).values():
            kind.over(tp)
    calls = sum(n.op == "call_function" for n in program.graph.nodes)
    return calls, counts["rules"], counts["strategies"]


def test_layers_that_are_alike_cost_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    few, rules, listed = analysed(3, monkeypatch)
    many, rules_of_many, listed_of_many = analysed(12, monkeypatch)
    assert many >= 3 * few
    assert rules_of_many == rules <= few
    assert listed_of_many == listed <= len(DEGREES) * rules
