"""Placement of every op of a block on the tp axis, as an integer program solved by HiGHS (OR-Tools
MathOpt).

Sets       ops o with strategies S(o); values v with placements; uses (v, c): op c reads value v
Variables  choose[o, s]      binary: op o runs with strategy s
           edge[v, c, p, q]  value v in placement p is read by c as q (continuous; integral at the
           optimum)
           move[v, p, q]     the reshard p -> q of v happens; consumers that want the same share it
           keep[v, q]        v is saved for the backward in placement q
Minimise   sum choose * (forward + backward seconds) + sum move * (collective seconds, both ways)
           + price * bytes,   bytes = sum keep * local bytes * in_flight + sum stored * local bytes
           * states
Subject to one strategy per op; edges agree with producer and consumer; move >= edge; keep >= edge.

`price` (seconds per byte) walks the frontier of time and memory: 0 gives the fastest placement
(ties go to
less memory), larger prices give up time for memory.
"""

from __future__ import annotations

import datetime
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from autopar.errors import InfeasibleError
from autopar.placement import Placement
from autopar.placement_problem import OpNode, Problem
from autopar.search.placement_objective import TIE, Solution, evaluate, kept_by


class Model:
    """The integer program of a problem, built once and solved for any price of memory.

    `seconds[v]` and `bytes[v]` are the two objectives of variable v.
    """

    def __init__(self, problem: Problem, in_flight: float = 1.0) -> None:
        self.problem = problem
        self.in_flight = in_flight
        self.seconds: list[float] = []
        self.bytes: list[float] = []
        self.binaries = 0
        self._lower: list[float] = []
        self._upper: list[float] = []
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self.choose: dict[tuple[str, str], int] = {}
        self._choices()
        self._moves(self._edges())
        self._keeps()

    def _variable(self, seconds: float = 0.0, size: float = 0.0) -> int:
        self.seconds.append(seconds)
        self.bytes.append(size)
        return len(self.seconds) - 1

    def _row(self, terms: dict[int, float], lower: float, upper: float) -> None:
        row = len(self._lower)
        self._lower.append(lower)
        self._upper.append(upper)
        for column in sorted(terms):
            self._rows.append(row)
            self._columns.append(column)
            self._values.append(terms[column])

    def _choices(self) -> None:
        """choose[o, s]: one strategy per op."""
        problem = self.problem
        for op in problem.ops:
            stored = problem.stored.get(op.name, 0.0)
            for c in op.choices:
                size = c.saves_bytes * self.in_flight
                if stored:
                    size += stored * problem.sizes[op.name][c.result]
                self.choose[op.name, c.name] = self._variable(c.seconds, size)
        self.binaries = len(self.seconds)
        for op in problem.ops:
            self._row({self.choose[op.name, c.name]: 1.0 for c in op.choices}, 1.0, 1.0)

    def _edges(self) -> list[tuple[str, dict[tuple[Placement, Placement], int]]]:
        """edge[v, c, p, q]: its sums over q and p are the producer's and the consumer's choice."""
        producer = {op.name: op for op in self.problem.ops}
        found = []
        for op in self.problem.ops:
            for position, value in enumerate(op.reads):
                wanted: dict[Placement, dict[int, float]] = defaultdict(dict)
                for c in op.choices:
                    wanted[c.operands[position]][self.choose[op.name, c.name]] = 1.0
                found.append((value, self._connect(producer[value], wanted, 0.0)))
        for value, placement in self.problem.sinks.items():
            found.append((value, self._connect(producer[value], {placement: {}}, 1.0)))
        return found

    def _connect(
        self, producer: OpNode, wanted: Mapping[Placement, dict[int, float]], constant: float
    ) -> dict[tuple[Placement, Placement], int]:
        legal = self.problem.moves[producer.name]
        given: dict[Placement, dict[int, float]] = defaultdict(dict)
        for c in producer.choices:
            given[c.result][self.choose[producer.name, c.name]] = -1.0
        edges = {(p, q): self._variable() for p in given for q in wanted if (p, q) in legal}
        for p, choices in given.items():
            self._row({**choices, **{v: 1.0 for (a, _), v in edges.items() if a == p}}, 0.0, 0.0)
        for q, choices in wanted.items():
            terms = {v: 1.0 for (_, b), v in edges.items() if b == q}
            self._row({**terms, **{v: -1.0 for v in choices}}, constant, constant)
        return edges

    def _moves(self, edges: list[tuple[str, dict[tuple[Placement, Placement], int]]]) -> None:
        """move[v, p, q] >= every edge that uses it; the edge itself when there is only one."""
        by_value = defaultdict(list)
        for value, found in edges:
            by_value[value].append(found)
        for value, uses in by_value.items():
            for (p, q), seconds in self.problem.moves[value].items():
                variables = [u[p, q] for u in uses if (p, q) in u] if seconds else []
                if len(variables) == 1:
                    self.seconds[variables[0]] += seconds
                elif variables:
                    move = self._variable(seconds)
                    for v in variables:
                        self._row({move: 1.0, v: -1.0}, 0.0, math.inf)

    def _keeps(self) -> None:
        """A saved value costs its local bytes once, however many ops save it."""
        wanted: dict[tuple[str, float], list[dict[int, float]]] = defaultdict(list)
        for op in self.problem.ops:
            # All choices of one op that keep the same memory go into one row: a tighter relaxation.
            rows: dict[tuple[str, float], dict[int, float]] = defaultdict(dict)
            for c in op.choices:
                variable = self.choose[op.name, c.name]
                for memory in kept_by(self.problem, op, c):
                    rows[memory][variable] = -1.0
            for memory, variables in rows.items():
                wanted[memory].append(variables)
        for (_, size), groups in wanted.items():
            if size:
                keep = self._variable(0.0, size * self.in_flight)
                for variables in groups:
                    self._row({keep: 1.0, **variables}, 0.0, math.inf)

    def solve(self, price: float = 0.0) -> Solution:
        """The cheapest placement; raises `InfeasibleError` when no combination is legal."""
        from ortools.math_opt.python import mathopt

        model = mathopt.Model.from_model_proto(self._proto(price))
        # Microseconds, so that the solver's absolute tolerances are far below any cost.
        parameters = mathopt.SolveParameters(
            random_seed=1, relative_gap_tolerance=0.0, time_limit=datetime.timedelta(seconds=60)
        )
        result = mathopt.solve(model, mathopt.SolverType.HIGHS, params=parameters)
        if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
            raise InfeasibleError(
                f"no legal placement: the solver says {result.termination.reason.name.lower()}",
                next_step="pin another tp degree or boundary placement",
            )
        values = result.variable_values(list(model.variables()))
        chosen = {
            op.name: max(op.choices, key=lambda c: values[self.choose[op.name, c.name]]).name
            for op in self.problem.ops
        }
        seconds, used = evaluate(self.problem, chosen, in_flight=self.in_flight)
        found = 1e6 * (seconds + (price + TIE) * used)
        if abs(found - result.objective_value()) > 1e-6 * max(1.0, abs(found)):
            raise AssertionError(
                f"placement objective {result.objective_value()} but the placement costs {found}"
            )
        return Solution(chosen, seconds, used)

    def _proto(self, price: float) -> Any:
        """Arrays, not expressions: building the model term by term takes longer than solving it."""
        from ortools.math_opt import model_pb2

        proto = model_pb2.ModelProto(name="placements")
        count = len(self.seconds)
        proto.variables.ids.extend(range(count))
        proto.variables.lower_bounds.extend([0.0] * count)
        proto.variables.upper_bounds.extend([1.0] * count)
        proto.variables.integers.extend([v < self.binaries for v in range(count)])
        proto.linear_constraints.ids.extend(range(len(self._lower)))
        proto.linear_constraints.lower_bounds.extend(self._lower)
        proto.linear_constraints.upper_bounds.extend(self._upper)
        proto.linear_constraint_matrix.row_ids.extend(self._rows)
        proto.linear_constraint_matrix.column_ids.extend(self._columns)
        proto.linear_constraint_matrix.coefficients.extend(self._values)
        weight = price + TIE
        cost = [1e6 * (s + weight * b) for s, b in zip(self.seconds, self.bytes, strict=True)]
        used = [v for v in range(count) if cost[v]]
        proto.objective.linear_coefficients.ids.extend(used)
        proto.objective.linear_coefficients.values.extend([cost[v] for v in used])
        return proto
