"""Placement of every op of a block on the tp axis, as an integer program solved by HiGHS (OR-Tools MathOpt).

Sets       ops o with strategies S(o); values v with placements; uses (v, c): op c reads value v
Variables  choose[o, s]      binary: op o runs with strategy s
           edge[v, c, p, q]  value v in placement p is read by c as q (continuous; integral at the optimum)
           move[v, p, q]     the reshard p -> q of v happens; consumers that want the same share it
           keep[v, q]        v is saved for the backward in placement q
Minimise   sum choose * (forward + backward seconds) + sum move * (collective seconds, both ways)
           + price * bytes,   bytes = sum keep * local bytes * in_flight + sum stored * local bytes * states
Subject to one strategy per op; edges agree with producer and consumer; move >= edge; keep >= edge.

`price` (seconds per byte) walks the frontier of time and memory: 0 gives the fastest placement (ties go to
less memory), larger prices give up time for memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.errors import InfeasibleError
from autopar.placement import Placement
from autopar.placement_problem import Problem


@dataclass(frozen=True, slots=True)
class Solution:
    """Chosen strategy of every op; `seconds` is the objective without the price of memory."""

    choice: dict[str, str]
    seconds: float
    bytes: float


# Breaks ties towards less memory: far below any real cost (1 GiB is worth a tenth of a microsecond).
TIE = 1e-16


def solve(problem: Problem, *, price: float = 0.0, in_flight: float = 1.0) -> Solution:
    """The cheapest placement; raises `InfeasibleError` when no combination is legal."""
    from ortools.math_opt.python import mathopt

    model = mathopt.Model(name="placements")
    weight = (price + TIE) * 1e6
    choose = {
        (op.name, c.name): model.add_binary_variable(name=f"{op.name}:{c.name}")
        for op in problem.ops
        for c in op.choices
    }
    terms = []
    for op in problem.ops:
        model.add_linear_constraint(sum(choose[op.name, c.name] for c in op.choices) == 1)
        for c in op.choices:
            cost = c.seconds * 1e6 + weight * c.saves_bytes * in_flight
            if op.name in problem.stored:
                cost += weight * problem.stored[op.name] * problem.sizes[op.name][c.result]
            if cost:
                terms.append(cost * choose[op.name, c.name])
    edges = _edges(model, problem, choose)
    terms += _moves(model, problem, edges)
    terms += _keeps(model, problem, choose, weight * in_flight)
    model.minimize(sum(terms) if terms else 0.0)
    result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=_parameters(mathopt))
    if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
        raise InfeasibleError(
            f"no legal placement: the solver says {result.termination.reason.name.lower()}",
            next_step="pin another tp degree or boundary placement",
        )
    values = result.variable_values()
    chosen = {
        op.name: max(op.choices, key=lambda c: values[choose[op.name, c.name]]).name
        for op in problem.ops
    }
    seconds, used = evaluate(problem, chosen, in_flight=in_flight)
    found = seconds * 1e6 + weight * used
    if abs(found - result.objective_value()) > 1e-6 * max(1.0, abs(found)):
        raise AssertionError(f"placement objective {result.objective_value()} but the placement costs {found}")
    return Solution(chosen, seconds, used)


def _parameters(mathopt):  # type: ignore[no-untyped-def]
    import datetime

    return mathopt.SolveParameters(
        random_seed=1, relative_gap_tolerance=0.0, time_limit=datetime.timedelta(seconds=60)
    )


def _edges(model, problem, choose):  # type: ignore[no-untyped-def]
    """edge[v, c, p, q]: its sums over q and p are the producer's and the consumer's choice."""
    producer = {op.name: op for op in problem.ops}
    edges: dict[tuple[str, str], dict[tuple[Placement, Placement], object]] = {}

    def connect(value: str, user: str, wanted: dict[Placement, object]) -> None:
        legal = problem.moves[value]
        given: dict[Placement, list[object]] = defaultdict(list)
        for c in producer[value].choices:
            given[c.result].append(choose[value, c.name])
        found = {
            (p, q): model.add_variable(lb=0.0, ub=1.0) for p in given for q in wanted if (p, q) in legal
        }
        for p, variables in given.items():
            model.add_linear_constraint(sum(v for (a, _), v in found.items() if a == p) == sum(variables))
        for q, total in wanted.items():
            model.add_linear_constraint(sum(v for (_, b), v in found.items() if b == q) == total)
        edges[value, user] = found

    for op in problem.ops:
        for position, value in enumerate(op.reads):
            wanted: dict[Placement, object] = {}
            for c in op.choices:
                q = c.operands[position]
                wanted[q] = wanted.get(q, 0) + choose[op.name, c.name]
            connect(value, op.name, wanted)
    for value, placement in problem.sinks.items():
        connect(value, "(out)", {placement: 1.0})
    return edges


def _moves(model, problem, edges):  # type: ignore[no-untyped-def]
    by_value = defaultdict(list)
    for (value, _), found in edges.items():
        by_value[value].append(found)
    terms = []
    for value, uses in by_value.items():
        for (p, q), seconds in problem.moves[value].items():
            if not seconds:
                continue
            variables = [u[p, q] for u in uses if (p, q) in u]
            if len(variables) == 1:
                terms.append(seconds * 1e6 * variables[0])
            elif variables:
                move = model.add_variable(lb=0.0, ub=1.0)
                for v in variables:
                    model.add_linear_constraint(move >= v)
                terms.append(seconds * 1e6 * move)
    return terms


def _keeps(model, problem, choose, weight):  # type: ignore[no-untyped-def]
    """A saved value costs its local bytes once per placement, however many ops save it."""
    wanted: dict[tuple[str, float], list[object]] = defaultdict(list)
    for op in problem.ops:
        # All choices of one op that keep the same memory go into one row: a tighter relaxation.
        rows: dict[tuple[str, float], dict[str, object]] = defaultdict(dict)
        for c in op.choices:
            for i in op.saved:
                rows[_memory(problem, op.reads[i], c.operands[i])][c.name] = choose[op.name, c.name]
            if op.saves_result:
                rows[_memory(problem, op.name, c.result)][c.name] = choose[op.name, c.name]
        for memory, variables in rows.items():
            wanted[memory].append(sum(variables.values()))
    terms = []
    for (_, size), variables in wanted.items():
        cost = weight * size
        if not cost:
            continue
        keep = model.add_variable(lb=0.0, ub=1.0)
        for v in variables:
            model.add_linear_constraint(keep >= v)
        terms.append(cost * keep)
    return terms


def _memory(problem: Problem, value: str, placement: Placement) -> tuple[str, float]:
    """Identity and local bytes of the memory behind a value: views share their root's."""
    root = problem.roots.get(value, value)
    if root in problem.stored:
        return root, 0.0
    return root, problem.sizes[value][placement]


def evaluate(problem: Problem, chosen: dict[str, str], *, in_flight: float = 1.0) -> tuple[float, float]:
    """Seconds and weighted bytes of a given placement, straight from the problem: no solver involved."""
    picked = {op.name: next(c for c in op.choices if c.name == chosen[op.name]) for op in problem.ops}
    seconds = sum(c.seconds for c in picked.values())
    used = sum(c.saves_bytes for c in picked.values()) * in_flight
    moves: set[tuple[str, Placement, Placement]] = set()
    kept: set[tuple[str, float]] = set()
    for op in problem.ops:
        choice = picked[op.name]
        for i, value in enumerate(op.reads):
            moves.add((value, picked[value].result, choice.operands[i]))
        kept |= {_memory(problem, op.reads[i], choice.operands[i]) for i in op.saved}
        if op.saves_result:
            kept.add(_memory(problem, op.name, choice.result))
    moves |= {(v, picked[v].result, q) for v, q in problem.sinks.items()}
    for value, p, q in moves:
        seconds += problem.moves[value][p, q]
    used += sum(size for _, size in kept) * in_flight
    for value, states in problem.stored.items():
        used += states * problem.sizes[value][picked[value].result]
    return seconds, used


def brute_force(problem: Problem, *, price: float = 0.0, in_flight: float = 1.0) -> float:
    """Least objective over all combinations; for tests on small problems."""
    import itertools

    best = float("inf")
    names: Sequence[str] = [op.name for op in problem.ops]
    for combination in itertools.product(*[[c.name for c in op.choices] for op in problem.ops]):
        try:
            seconds, used = evaluate(problem, dict(zip(names, combination, strict=True)), in_flight=in_flight)
        except KeyError:
            continue
        best = min(best, seconds + (price + TIE) * used)
    return best
