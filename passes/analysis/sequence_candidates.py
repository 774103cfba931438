"""Candidates on the axis cp, which splits the sequence of every sample over ranks.

The rules are those of any axis. What differs: causal attention may be split by rows of queries
(keys and values are gathered then), the mean of a loss is put together from the parts of the ranks,
and parameters stay whole, so forms for split tables, classes and experts are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from autopar.op_call import OpCall, Operand
from autopar.passes.analysis.candidates import Candidates, RuledCall, candidates
from autopar.rules.attention import by_rows
from autopar.rules.language import Rule
from autopar.rules.strategy import Strategy, strategies
from autopar.sequence_shards import ATTENTION, ATTENTION_ROWS, LOSS_SHARE

# The local op of a rule -> the one that serves here.
_LOCAL = {"": "", ATTENTION_ROWS: ATTENTION_ROWS, "token_cross_entropy": LOSS_SHARE}
# Op -> position of its weight among the arguments.
_WEIGHTS = {"linear": 1, "addmm": 2, "embedding": 0, "experts": 4}


def sequence_candidates(
    graph: fx.GraphModule,
    ranks: int,
    known: Mapping[str, RuledCall] | None = None,
    tp: int = 1,
) -> Candidates:
    """Strategies of every op of a static graph over `ranks` ranks of cp.

    `tp`: ranks over which heads are to be split as well: attention is split by heads over cp only
    where each of the `tp` ranks is left with whole ones.
    """
    return candidates(graph, ranks, known, lambda call, rule: _legal(call, rule, ranks, tp))


def _legal(call: OpCall, rule: Rule | None, ranks: int, tp: int) -> list[Strategy]:
    if call.op_name == ATTENTION and rule is not None:
        rule = by_rows(call, rule)
        if rule.sizes.get("g", 0) % (ranks * tp):
            rule = replace(rule, whole=rule.whole | {"g"})
    weight = _weight(call)
    return [
        replace(s, local_op=_LOCAL[s.local_op])
        for s in strategies(call, rule, ranks)
        if s.local_op in _LOCAL and (weight is None or s.operands[weight].is_whole)
    ]


def _weight(call: OpCall) -> int | None:
    """The operand that is a weight, of which no rank is to use a slice only: that is tp's task."""
    position = _WEIGHTS.get(call.op_name)
    operand = call.args[position] if position is not None else None
    return operand.index if isinstance(operand, Operand) else None
