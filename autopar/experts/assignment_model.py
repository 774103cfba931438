"""The assignment of one layer's experts as an integer program, from a known one on.

sets        e experts, r ranks, n numbers of copies;   part[e, n] = load[e] / n, in whole units
variables   copies[e, n]   expert e has n copies
            holds[e, r, n] rank r holds one of the n copies of e
minimise    busiest
subject to  one number      sum_n copies[e, n] = 1
            as many copies  sum_r holds[e, r, n] = n copies[e, n]
            replicas        sum_e,n (n - 1) copies[e, n] = replicas        (at most, when free)
            slots           sum_e,n holds[e, r, n] = slots of a rank       (at most, when free)
            rows            sum_e,n part[e, n] holds[e, r, n] <= busiest
            symmetry        ranks are alike: the heaviest expert is on rank 0
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from autopar.experts.assignment_bound import best_copies
from autopar.experts.ranks_load import Holders, Request, rows_of_ranks

# Seconds below which a solver has no time to begin, and variables above which it would not end.
_LEAST_SECONDS = 0.3
_MOST_VARIABLES = 40_000
# Rows are counted in units so small that all of them are about this many.
_UNITS = 2**40


@dataclass
class _Model:
    model: Any
    copies: dict[tuple[int, int], Any]
    holds: dict[tuple[int, int, int], Any]
    busiest: Any
    scale: float
    complete: bool


def improved_by_solver(
    request: Request, known: Holders, bound: float, seconds: float, seed: int
) -> tuple[Holders, float]:
    """An assignment no worse than `known`, and a bound (0 when there is none) that was proven."""
    from ortools.sat.python import cp_model  # here: runs import this, and need no solver

    options, complete = _options(request)
    size = sum(len(o) for o in options) * request.ranks
    if seconds < _LEAST_SECONDS or size > _MOST_VARIABLES:
        return known, 0.0
    built = _build(cp_model.CpModel(), request, options, complete, bound)
    _hint(built, request, known)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.random_seed = seed
    solver.parameters.num_workers = min(8, os.cpu_count() or 1)
    # CP-SAT 9.15 loses optimal assignments when it probes: of loads 0, 1 and 5 with one replica on
    # two ranks it calls 5 optimal, where 3.5 is (and finds it without).
    solver.parameters.cp_model_probing_level = 0
    status = solver.solve(built.model)
    # Parts are rounded down, so that the bound of the rounded is one of the true.
    solved = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    proven = solver.best_objective_bound / built.scale if solved and complete else 0.0
    if not solved:
        return known, 0.0
    found: list[list[int]] = [[] for _ in request.load]
    for (expert, rank, _), variable in built.holds.items():
        if solver.value(variable):
            found[expert].append(rank)
    holders = tuple(tuple(sorted(ranks)) for ranks in found)
    better = max(rows_of_ranks(request, holders)) < max(rows_of_ranks(request, known))
    return (holders if better else known), proven


def _options(request: Request) -> tuple[list[range], bool]:
    """Numbers of copies to choose from, by expert; and whether these are all there could be."""
    every = range(1, request.most_copies + 1)
    if len(request.load) * request.ranks * len(every) <= _MOST_VARIABLES:
        return [every] * len(request.load), True
    some = best_copies(request.load, request.replicas, request.most_copies)
    return [range(max(1, n - 1), min(n + 1, request.most_copies) + 1) for n in some], False


def _build(
    model: Any, request: Request, options: list[range], complete: bool, bound: float
) -> _Model:
    whole = not request.replicas and all(float(rows).is_integer() for rows in request.load)
    total = sum(request.load)
    scale = 1.0 if whole or not total else _UNITS / total
    ranks = range(request.ranks)
    copies = {
        (e, n): model.new_bool_var(f"copies[{e},{n}]") for e, o in enumerate(options) for n in o
    }
    holds = {(e, r, n): model.new_bool_var(f"holds[{e},{r},{n}]") for e, n in copies for r in ranks}
    least = int(bound * scale * (1 - 1e-9))
    busiest = model.new_int_var(least, int(sum(request.load) * scale) + 1, "busiest")
    built = _Model(model, copies, holds, busiest, scale, complete)
    _one_number(built, options)
    _as_many_copies(built, request)
    _replicas(built, request)
    _slots(built, request)
    _rows(built, request)
    _symmetry(built, request, options)
    model.minimize(busiest)
    return built


def _one_number(built: _Model, options: list[range]) -> None:
    for expert, numbers in enumerate(options):
        built.model.add_exactly_one(built.copies[expert, n] for n in numbers)


def _as_many_copies(built: _Model, request: Request) -> None:
    for (expert, n), chosen in built.copies.items():
        held = [built.holds[expert, r, n] for r in range(request.ranks)]
        built.model.add(sum(held) == n * chosen)


def _replicas(built: _Model, request: Request) -> None:
    extra = sum((n - 1) * chosen for (_, n), chosen in built.copies.items() if n > 1)
    if request.most_copies > 1:
        built.model.add(extra == request.replicas if request.equal else extra <= request.replicas)


def _slots(built: _Model, request: Request) -> None:
    for rank in range(request.ranks):
        held = sum(v for (_, r, _), v in built.holds.items() if r == rank)
        built.model.add(held == request.slots if request.equal else held <= request.slots)


def _rows(built: _Model, request: Request) -> None:
    for rank in range(request.ranks):
        rows = sum(
            int(request.load[e] * built.scale / n) * variable
            for (e, r, n), variable in built.holds.items()
            if r == rank
        )
        built.model.add(rows <= built.busiest)


def _symmetry(built: _Model, request: Request, options: list[range]) -> None:
    heaviest = _heaviest(request)
    built.model.add_exactly_one(built.holds[heaviest, 0, n] for n in options[heaviest])


def _heaviest(request: Request) -> int:
    return max(range(len(request.load)), key=lambda e: request.load[e])


def _hint(built: _Model, request: Request, known: Holders) -> None:
    """The known assignment, its ranks renamed as the symmetry asks for."""
    first = known[_heaviest(request)][0]
    renamed = {first: 0, 0: first}
    ranks_of = [{renamed.get(r, r) for r in ranks} for ranks in known]
    for (expert, n), variable in built.copies.items():
        built.model.add_hint(variable, int(len(ranks_of[expert]) == n))
    for (expert, rank, n), variable in built.holds.items():
        held = rank in ranks_of[expert] and len(ranks_of[expert]) == n
        built.model.add_hint(variable, int(held))
