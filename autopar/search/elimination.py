"""Placement of every op of a block by variable elimination: exact, and fast on narrow graphs.

The objective of `placement_objective` is a sum of terms, each over few ops: a term for an op alone,
one for a value and its readers (what they make it move), one for a saved memory and those that save
it. Ops are removed one at a time: the terms that mention an op are added up into a table over its
neighbours and minimised over its strategies; the table is a term of what is left. Walking back
through the minimisers gives the placement (non-serial dynamic programming: Bertelè and Brioschi,
"Nonserial Dynamic Programming", 1972).

The tables of a transformer block stay below some ten thousand entries. All prices of memory are
solved at once: they are the first axis of every table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

from autopar.errors import InfeasibleError
from autopar.placement import Placement
from autopar.placement_problem import Problem
from autopar.search.placement_objective import TIE, Solution, evaluate, kept_by

Floats = NDArray[np.float64]
# Entries of the largest table that is worth building, 128 MiB: latent attention needs a third.
MOST_ENTRIES = 1 << 24


@dataclass(frozen=True)
class _Term:
    """Costs over the strategies of `ops`: an axis for prices (1: alike for all), then theirs."""

    ops: tuple[int, ...]
    costs: Floats


@dataclass(frozen=True)
class _Step:
    """How to choose the strategy of `op` when those of all others of `terms` are known."""

    op: int
    terms: list[_Term]

    def best(self, price: int, chosen: Sequence[int]) -> int:
        total = np.zeros(())
        for term in self.terms:
            at = [slice(None) if o == self.op else chosen[o] for o in term.ops]
            total = total + term.costs[(min(price, len(term.costs) - 1), *at)]
        return int(total.argmin())


def eliminate(
    problem: Problem,
    prices: Sequence[float],
    *,
    in_flight: float = 1.0,
    most_entries: int = MOST_ENTRIES,
) -> list[Solution] | None:
    """The cheapest placement for each price (seconds per byte).

    None when a table would have more than `most_entries` entries. Raises `InfeasibleError` when no
    combination is legal.
    """
    counts = [len(op.choices) for op in problem.ops]
    scopes = _scopes(problem)
    order, largest = _order(counts, scopes)
    largest = max([largest, *(prod(counts[o] for o in scope) for scope in scopes)])
    if largest * len(prices) > most_entries:
        return None
    weights = np.array([price + TIE for price in prices])
    terms = _terms(problem, weights, in_flight)
    least, steps = _remove_all(terms, order, len(prices))
    if not np.isfinite(least).all():
        raise InfeasibleError(
            "no legal placement: no combination of strategies connects",
            next_step="pin another tp degree or boundary placement",
        )
    found = []
    for number, chosen in enumerate(_walk_back(steps, len(counts), len(prices))):
        names = {op.name: op.choices[c].name for op, c in zip(problem.ops, chosen, strict=True)}
        seconds, used = evaluate(problem, names, in_flight=in_flight)
        cost = seconds + float(weights[number]) * used
        if abs(cost - least[number]) > 1e-9 * max(cost, 1e-12):
            raise AssertionError(f"elimination says {least[number]}, the placement costs {cost}")
        found.append(Solution(names, seconds, used))
    return found


def _order(counts: Sequence[int], scopes: Iterable[frozenset[int]]) -> tuple[list[int], int]:
    """Greedy: always the op with the smallest table. Also returns the largest table's entries."""
    near: dict[int, set[int]] = {op: set() for op in range(len(counts))}
    for scope in scopes:
        for op in scope:
            near[op] |= scope - {op}
    sizes = {op: counts[op] * prod(counts[o] for o in near[op]) for op in near}
    order, largest = [], 1
    while sizes:
        op = min(sizes, key=lambda o: (sizes[o], o))
        largest = max(largest, sizes.pop(op))
        order.append(op)
        around = near.pop(op)
        for other in around:
            near[other] |= around - {other}
            near[other].discard(op)
        for other in around:
            sizes[other] = counts[other] * prod(counts[o] for o in near[other])
    return order, largest


def _remove_all(
    terms: list[_Term], order: Sequence[int], prices: int
) -> tuple[Floats, list[_Step]]:
    """The least cost for each price, and the steps of the elimination."""
    holding: dict[int, set[int]] = defaultdict(set)
    alive = dict(enumerate(terms))
    for number, term in alive.items():
        for op in term.ops:
            holding[op].add(number)
    least = np.zeros(prices)
    steps = []
    for op in order:
        # The smaller first: their sum is a small table too.
        together = sorted((alive.pop(n) for n in sorted(holding.pop(op))), key=_entries)
        ops = tuple(sorted({o for t in together for o in t.ops} - {op}))
        steps.append(_Step(op, together))
        rest = _Term(ops, _least(together, op, ops))
        number = len(terms) + len(steps)
        for other in ops:
            holding[other] = {n for n in holding[other] if n in alive} | {number}
        if ops:
            alive[number] = rest
        else:
            least = least + rest.costs
    return least, steps


def _entries(term: _Term) -> int:
    return term.costs.size


def _least(terms: Sequence[_Term], op: int, ops: tuple[int, ...]) -> Floats:
    """The terms added up over the axes (prices, *ops), at the best strategy of `op`.

    One strategy after the other, as the table over all of them is the largest by far.
    """
    axes = {other: axis for axis, other in enumerate((op, *ops))}
    spread = [_spread(term, axes) for term in terms]
    least: Floats | None = None
    for choice in range(len(spread[0])):
        total = spread[0][choice]
        for costs in spread[1:]:
            total = total + costs[choice]
        least = total if least is None else np.minimum(least, total)
    assert least is not None, "every op has a strategy"
    return least


def _spread(term: _Term, axes: Mapping[int, int]) -> Floats:
    """The costs of a term over all `axes`, the first of them before that of prices."""
    at = [axes[op] for op in term.ops]
    ranked = sorted(range(len(at)), key=at.__getitem__)
    costs = term.costs.transpose(1 + ranked[0], 0, *(i + 1 for i in ranked[1:]))
    shape = [costs.shape[0], costs.shape[1], *[1] * (len(axes) - 1)]
    for i, size in zip(ranked[1:], costs.shape[2:], strict=True):
        shape[1 + at[i]] = size
    return costs.reshape(shape)


def _walk_back(steps: Sequence[_Step], ops: int, prices: int) -> list[list[int]]:
    """For each price, the number of every op's strategy."""
    found = []
    for price in range(prices):
        chosen = [0] * ops
        for step in reversed(steps):
            chosen[step.op] = step.best(price, chosen)
        found.append(chosen)
    return found


def _readers(problem: Problem) -> dict[str, list[tuple[int, int]]]:
    """value -> (number of the op, position of the operand) of everything that reads it."""
    found: dict[str, list[tuple[int, int]]] = {op.name: [] for op in problem.ops}
    for number, op in enumerate(problem.ops):
        for position, value in enumerate(op.reads):
            found[value].append((number, position))
    return found


def _savers(problem: Problem) -> dict[tuple[str, float], dict[int, list[bool]]]:
    """Memory -> op -> which of its strategies keep that memory."""
    found: dict[tuple[str, float], dict[int, list[bool]]] = defaultdict(dict)
    for number, op in enumerate(problem.ops):
        for index, choice in enumerate(op.choices):
            for memory in kept_by(problem, op, choice):
                if memory[1]:
                    wants = found[memory].setdefault(number, [False] * len(op.choices))
                    wants[index] = True
    return found


def _scopes(problem: Problem) -> set[frozenset[int]]:
    """The ops of every term."""
    position = {op.name: i for i, op in enumerate(problem.ops)}
    scopes = {
        frozenset([position[v], *(number for number, _ in readers)])
        for v, readers in _readers(problem).items()
    }
    return scopes | {frozenset(ops) for ops in _savers(problem).values()}


def _terms(problem: Problem, weights: Floats, in_flight: float) -> list[_Term]:
    position = {op.name: i for i, op in enumerate(problem.ops)}
    terms = []
    for number, op in enumerate(problem.ops):
        stored = problem.stored.get(op.name, 0.0)
        sizes = problem.sizes[op.name]
        seconds = np.array([c.seconds for c in op.choices])
        used = np.array(
            [
                c.saves_bytes * in_flight + (stored * sizes[c.result] if stored else 0.0)
                for c in op.choices
            ]
        )
        terms.append(_Term((number,), seconds[None] + weights[:, None] * used[None]))
    for value, readers in _readers(problem).items():
        if readers or value in problem.sinks:
            terms.append(_moves(problem, position[value], readers))
    for (_, size), savers in _savers(problem).items():
        ops = tuple(sorted(savers))
        kept = _any(ops, {op: np.array(savers[op]) for op in ops})
        price = (weights * (size * in_flight)).reshape(-1, *[1] * len(ops))
        terms.append(_Term(ops, price * kept[None]))
    return terms


def _moves(problem: Problem, producer: int, readers: Sequence[tuple[int, int]]) -> _Term:
    """What moving a value costs, over the strategies of its producer and of its readers."""
    made = problem.ops[producer]
    ops = (producer, *sorted({number for number, _ in readers}))
    wanted: dict[Placement, dict[int, NDArray[np.bool_]]] = defaultdict(dict)
    for number, position in readers:
        choices = problem.ops[number].choices
        for target in {c.operands[position] for c in choices}:
            uses = np.array([c.operands[position] == target for c in choices])
            old = wanted[target].get(number)
            wanted[target][number] = uses if old is None else old | uses
    if (sink := problem.sinks.get(made.name)) is not None:
        wanted[sink][producer] = np.ones(len(made.choices), np.bool_)
    legal = problem.moves[made.name]
    total = np.zeros([len(problem.ops[o].choices) for o in ops])
    for target, by_op in wanted.items():
        seconds = np.array([legal.get((c.result, target), np.inf) for c in made.choices])
        seconds = seconds.reshape(-1, *[1] * (len(ops) - 1))
        total = total + np.where(_any(ops, by_op), seconds, 0.0)
    return _Term(ops, total[None])


def _any(ops: tuple[int, ...], uses: dict[int, NDArray[np.bool_]]) -> NDArray[np.bool_]:
    """Over the axes of `ops`: whether any of them uses it."""
    found = np.zeros([1] * len(ops), np.bool_)
    for axis, op in enumerate(ops):
        if op in uses:
            shape = [1] * len(ops)
            shape[axis] = -1
            found = found | uses[op].reshape(shape)
    return found
