"""Whether samples of a batch depend on each other before the loss: then parts can't be run alone.

The dim that holds the batch is followed through the rules of the ops. An op that contracts,
reduces or needs it whole mixes samples. What an op without a rule makes is not followed further.
"""

from __future__ import annotations

from torch import fx

from autopar.errors import AutoparError
from autopar.op_call import Bindings, op_call
from autopar.passes.analysis.loss_form import loss_tail
from autopar.program import Program
from autopar.rules import rule_for
from autopar.rules.language import Rule

# A batch that no other size is likely to equal.
PRIME = 11


def coupling_op(program: Program) -> fx.Node | None:
    """The first op before the loss that mixes samples; None when none is seen."""
    sizes = dict(program.sizes)
    if "batch" in program.symbols:
        sizes["batch"] = PRIME
    bindings = Bindings(program.symbols, sizes)
    batched = {i.name for i in program.of_kind("input") if i.batch_dim == 0}
    at: dict[str, int] = {n: 0 for n in batched}
    tail = loss_tail(program)
    nodes: list[fx.Node] = list(program.graph.nodes)
    for node in nodes:
        if node.op != "call_function" or node in tail:
            continue
        if not any(n.name in at for n in node.all_input_nodes):
            continue
        try:
            call = op_call(node, bindings)
            rule = rule_for(call)
        except (AutoparError, IndexError, TypeError, AttributeError):
            continue
        if rule is None:
            continue
        found = _follow(rule, [at.get(name) for name in call.operands])
        if found is None:
            return node
        if found >= 0:
            at[node.name] = found
    return None


def _follow(rule: Rule, dims: list[int | None]) -> int | None:
    """Dim of the batch in the result; -1 when it is lost from sight, None when samples mix."""
    factors = {
        operand[dim][0]
        for operand, dim in zip(rule.operands, dims, strict=True)
        if dim is not None and dim < len(operand) and operand[dim]
    }
    if len(factors) != 1:
        # Two factors: every sample of one operand meets every sample of the other.
        return None if factors else -1
    factor = factors.pop()
    if factor in rule.whole:
        return None
    for index, dim in enumerate(rule.results[0]):
        if dim and dim[0] == factor:
            return index
    return None if not any(factor in dim for dim in rule.results[0]) else -1
