"""What is found out about a chosen plan alone: formulas, heaviest ops, a second solver's word."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from autopar.block_cost import ChainCost
from autopar.cost.expert_copies import COPIED_OVER, expert_copies_seconds
from autopar.search.result import Choice
from autopar.workflow.activation_formula import ActivationFormula, activation_formula
from autopar.workflow.heaviest_ops import HeavyOp, heaviest_ops
from autopar.workflow.memory_formulas import MemoryFormulas, memory_formulas
from autopar.workflow.model_costs import ModelCosts


@dataclass(frozen=True)
class Explanation:
    """What is found out about a chosen plan alone. `confirmed`: how many placement problems a
    second solver found the same optimum for. `experts`: of a layer, where ep splits them;
    `hidden`: the part of the seconds of their exchange that compute hides; `copies`: seconds of a
    step in which copies of experts add up their gradients, on the rank where it takes longest.
    `heaviest`: its heaviest ops; `classes`: seconds of a step by roofline class; `memory`: the
    terms of its fullest rank as formulas."""

    formula: ActivationFormula | None = None
    confirmed: int = 0
    experts: int = 0
    hidden: float = 0.0
    copies: float = 0.0
    heaviest: tuple[HeavyOp, ...] = ()
    classes: dict[str, float] = field(default_factory=dict)
    memory: MemoryFormulas | None = None

    def into(self, predictions: dict[str, Any]) -> dict[str, Any]:
        """The predictions of a plan with what was found out about it."""
        found: dict[str, Any] = {}
        if self.formula:
            found["activation_formula"] = self.formula.to_dict()
        if self.memory:
            found["memory_formulas"] = self.memory.to_dict()
        if self.experts:
            found["experts"] = self.experts
        if self.hidden:
            found["experts_hidden"] = self.hidden
        if self.copies:
            found["copies_seconds"] = self.copies
        if self.classes:
            found["class_seconds"] = self.classes
        if self.heaviest:
            found["heaviest_ops"] = [op.to_dict() for op in self.heaviest]
        predictions["search"]["placements_confirmed"] = self.confirmed
        return {**predictions, **found}


def explanation(costs: ModelCosts, choice: Choice, seconds: dict[str, float]) -> Explanation:
    """All of it; the seconds that it took are added to `seconds`."""
    start = time.perf_counter()
    chain, tp, cp, ep = choice.chain, choice.mesh.tp, choice.mesh.cp, choice.mesh.ep
    confirmed = costs.over(cp, tp, ep).confirm(chain, tp, choice.microbatch)
    sizes = {**costs.sizes, "batch": choice.microbatch}
    formula = activation_formula(
        costs.program,
        costs.blocks,
        chain.placements,
        chain.boundary,
        tp,
        sizes,
        cp=cp,
        cp_placements=chain.cp_placements,
        ep=ep,
    )
    (heaviest, classes), memory = heaviest_ops(costs, choice), memory_formulas(choice)
    seconds["explain"] = time.perf_counter() - start
    experts, hidden = costs.experts if ep > 1 else 0, _hidden_part(chain)
    copies = _copies_part(choice)
    return Explanation(formula, confirmed, experts, hidden, copies, heaviest, classes, memory)


def _hidden_part(chain: ChainCost) -> float:
    """Of the seconds that rows travel between replicas, the part that compute hides; 0 for none."""
    hidden = sum(b.hidden_ep for b in chain.blocks)
    exposed = sum(b.forward_ep + b.backward_ep for b in chain.blocks)
    return hidden / (hidden + exposed) if hidden else 0.0


def _copies_part(choice: Choice) -> float:
    """Seconds in which copies of experts add up their gradients, were every spare slot one: of the
    rank where it takes longest."""
    costs, setting = {b.name: b for b in choice.chain.blocks}, choice.setting
    return max(
        sum(
            expert_copies_seconds(costs[name], setting, axis)
            for part in setting.parts_of(rank)
            for name in choice.stages[part].blocks
            for axis in COPIED_OVER
        )
        for rank in range(choice.mesh.pp)
    )
