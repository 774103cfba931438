"""What a placement of a block's ops costs, computed straight from the problem: no solver involved.

    seconds = sum over ops of the chosen strategy's seconds
            + sum over values of the distinct reshards that their readers want
    bytes   = sum of distinct saved memories * in_flight + sum of stored parameters * states

The searches minimise seconds + (price + TIE) * bytes; what they answer is evaluated here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.placement import Placement
from autopar.placement_problem import Choice, OpNode, Problem


@dataclass(frozen=True, slots=True)
class Solution:
    """Chosen strategy of every op; `seconds` is the objective without the price of memory."""

    choice: dict[str, str]
    seconds: float
    bytes: float


# Breaks ties towards less memory: far below any real cost (1 GiB is worth a tenth of a
# microsecond).
TIE = 1e-16


def memory_of(problem: Problem, value: str, placement: Placement) -> tuple[str, float]:
    """Identity and local bytes of the memory behind a value: views share their root's."""
    root = problem.roots.get(value, value)
    if root in problem.stored:
        return root, 0.0
    return root, problem.sizes[value][placement]


def kept_by(problem: Problem, op: OpNode, choice: Choice) -> list[tuple[str, float]]:
    """The memories that an op keeps for the backward under one of its strategies."""
    kept = [memory_of(problem, op.reads[i], choice.operands[i]) for i in op.saved]
    return [*kept, memory_of(problem, op.name, choice.result)] if op.saves_result else kept


def _picked(problem: Problem, chosen: dict[str, str]) -> dict[str, Choice]:
    """The chosen strategy of every op."""
    return {op.name: next(c for c in op.choices if c.name == chosen[op.name]) for op in problem.ops}


def _moves(problem: Problem, picked: dict[str, Choice]) -> set[tuple[str, Placement, Placement]]:
    """The distinct reshards that readers and sinks want: (value, from, to)."""
    moves = {
        (value, picked[value].result, picked[op.name].operands[i])
        for op in problem.ops
        for i, value in enumerate(op.reads)
    }
    return moves | {(v, picked[v].result, q) for v, q in problem.sinks.items()}


def evaluate(
    problem: Problem, chosen: dict[str, str], *, in_flight: float = 1.0
) -> tuple[float, float]:
    """Seconds and weighted bytes of a given placement, straight from the problem: no solver
    involved."""
    picked = _picked(problem, chosen)
    seconds = sum(c.seconds for c in picked.values())
    used = sum(c.saves_bytes for c in picked.values()) * in_flight
    kept = {m for op in problem.ops for m in kept_by(problem, op, picked[op.name])}
    for value, p, q in _moves(problem, picked):
        seconds += problem.moves[value][p, q]
    used += sum(size for _, size in kept) * in_flight
    for value, states in problem.stored.items():
        used += states * problem.sizes[value][picked[value].result]
    return seconds, used


def brute_force(problem: Problem, *, price: float = 0.0, in_flight: float = 1.0) -> float:
    """Least objective over all combinations; for tests on small problems."""
    best = float("inf")
    names: Sequence[str] = [op.name for op in problem.ops]
    for combination in itertools.product(*[[c.name for c in op.choices] for op in problem.ops]):
        try:
            seconds, used = evaluate(
                problem, dict(zip(names, combination, strict=True)), in_flight=in_flight
            )
        except KeyError:
            continue
        best = min(best, seconds + (price + TIE) * used)
    return best


def seconds_by_block(problem: Problem, chosen: dict[str, str]) -> dict[str, float]:
    """`evaluate`'s seconds by the block that an op belongs to (the prefix of its name).

    What stored parameters cost is left out: summing their gradients is paid once per step.
    """
    found: dict[str, float] = {}
    picked = _picked(problem, chosen)
    for name, choice in picked.items():
        if name not in problem.stored:
            block = name.split("|", 1)[0]
            found[block] = found.get(block, 0.0) + choice.seconds
    for value, p, q in _moves(problem, picked):
        if value not in problem.stored:
            found[value.split("|", 1)[0]] += problem.moves[value][p, q]
    return found
