"""The same inner problems in several formulations: what the choice of solver rests on.

Placement of a block's ops: variable elimination, and one integer program under several solvers.
Cuts and recomputation: the decomposition of `autopar.search.stages`, and a set-partitioning integer
program whose columns are intervals of blocks with a number of recomputed ones.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autopar.axis import Axis
from autopar.cluster import Cluster
from autopar.cost.setting import Setting
from autopar.mesh import Mesh
from autopar.models import resolve_model
from autopar.passes.analysis.block_problem import build_problem
from autopar.passes.capture import capture
from autopar.placement import Shard
from autopar.placement_problem import Problem
from autopar.search import columns, stages
from autopar.search.elimination import eliminate
from autopar.search.placement_objective import TIE, evaluate
from autopar.search.placement_program import Model
from autopar.search.windows import Reach
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.prepare import prepare
from search_chain import MadeUpChain

PRICE = 1e-12


@dataclass(frozen=True)
class Timed:
    """`answer`: the objective reached; None when there was none in time."""

    problem: str
    formulation: str
    seconds: float
    answer: float | None
    note: str = ""

    def row(self, beside: Sequence[Timed]) -> str:
        known = [t.answer for t in beside if t.problem == self.problem and t.answer is not None]
        against = "-" if self.answer is None else f"+{self.answer / min(known) - 1:.2%}"
        answer = "none" if self.answer is None else f"{self.answer:.6g}"
        note = f" ({self.note})" if self.note else ""
        return (
            f"| {self.problem} | {self.formulation} | {self.seconds:.2f} | {answer}{note} | "
            f"{against} |"
        )


def placement_formulations(limit: float) -> list[Timed]:
    """The repeated block of Llama-3-70B on a tp axis of 8, split along the sequence."""
    problem = _llama_block()
    name = f"placements, {len(problem.ops)} ops"
    begin = time.perf_counter()
    solved = eliminate(problem, (PRICE,))
    assert solved is not None
    found = [
        Timed(
            name,
            "variable elimination",
            time.perf_counter() - begin,
            solved[0].seconds + (PRICE + TIE) * solved[0].bytes,
        )
    ]
    for solver in ("HIGHS", "GSCIP", "CP_SAT"):
        model = Model(problem)
        proto = model._proto(PRICE)
        begin = time.perf_counter()
        values, note = _solve(proto, solver, limit)
        seconds = time.perf_counter() - begin
        answer = None
        if values is not None:
            chosen = {
                op.name: max(op.choices, key=lambda c: values[model.choose[op.name, c.name]]).name
                for op in problem.ops
            }
            spent, used = evaluate(problem, chosen)
            answer = spent + (PRICE + TIE) * used
        found.append(Timed(name, f"integer program, {solver}", seconds, answer, note))
    return found


def _llama_block() -> Problem:
    source = resolve_model("zoo:llama3-70b", sequence=8192, dtype=torch.bfloat16)
    program = capture(source.model, source.example_inputs, name=source.name, dtype=torch.bfloat16)
    prepared = prepare(program, dict(program.sizes))
    costs = ModelCosts(prepared, Cluster.parse("h100:8x8"), dict(prepared.sizes))
    kinds = costs.kinds.at(1)
    repeated = max(kinds, key=lambda k: sum(b.kind == k for b in costs.blocks.chain))
    kind, axis = kinds[repeated], Axis(8, 1, costs.cluster)
    return build_problem(
        [(repeated, kind.graph, kind.slots, kind.over(8))], axis, Shard(1), costs.state_bytes
    )


def _solve(proto: object, solver: str, limit: float) -> tuple[list[float] | None, str]:
    """Values of all variables, and how sure the solver was."""
    from ortools.math_opt.python import mathopt

    model = mathopt.Model.from_model_proto(proto)
    parameters = mathopt.SolveParameters(
        random_seed=1,
        relative_gap_tolerance=0.0,
        time_limit=datetime.timedelta(seconds=limit),
        threads=None if solver == "HIGHS" else 1,
    )
    try:
        result = mathopt.solve(model, mathopt.SolverType[solver], params=parameters)
    except Exception as error:
        # What the solver says it can't take is an answer too.
        return None, f"refused: {type(error).__name__}"
    reason = result.termination.reason.name.lower()
    if not result.has_primal_feasible_solution():
        return None, reason
    bound = result.termination.objective_bounds
    gap = abs(bound.primal_bound - bound.dual_bound) / max(abs(bound.primal_bound), 1e-30)
    note = "proven" if reason == "optimal" else f"gap {gap:.1%}"
    return list(result.variable_values(list(model.variables()))), note


def stage_formulations(limit: float) -> list[Timed]:
    """126 layers on 16 stages with memory that makes most stages recompute."""
    on = Cluster.parse("h100:16x8")
    setting = Setting(on, Mesh(16, 8, 1), 1, 32, zero=1, precision="bf16-mixed")
    tables = columns.build(MadeUpChain(on, 126, (4096,)).optimistic(1, 1).blocks, setting)
    memory = _tight(tables)
    name = f"cuts and recomputation, {tables.blocks} blocks, {tables.stages} stages"
    begin = time.perf_counter()
    solved = stages.solve(tables, memory)
    assert solved is not None
    found = [Timed(name, "decomposition", time.perf_counter() - begin, solved.objective)]
    options = _options(tables, memory)
    for solver in ("HIGHS", "GSCIP", "CP_SAT"):
        begin = time.perf_counter()
        answer, note = _partition_program(tables, options, solver, limit)
        seconds = time.perf_counter() - begin
        found.append(Timed(name, f"set partitioning, {solver}", seconds, answer, note))
    return found


def _tight(tables: columns.Columns) -> int:
    """Memory between what the best cuts need with full and without any recomputation."""
    free = stages.solve(tables, 1 << 60)
    least = stages.solve(tables, 1 << 60, recompute="full")
    assert free is not None and least is not None
    return (max(free.peaks) + max(least.peaks)) // 2


Option = tuple[int, int, int, float, float]  # stage, first block, end, seconds, end seconds


def _options(tables: columns.Columns, memory: int) -> list[Option]:
    """Every stage and interval that fits, with its cheapest recomputation."""
    windows = Reach(tables, memory, tables.kept).below(math.inf)
    assert windows is not None
    search = stages._Search(tables, memory, "auto", None, windows)
    found = []
    for stage, row, column in zip(*np.nonzero(np.isfinite(search.table.seconds)), strict=True):
        cell = int(stage), int(row), int(column)
        seconds = float(search.table.seconds[cell])
        if not search.exact[cell]:
            seconds = search._plain(cell) + search._knapsack(cell)[0]
        if np.isfinite(seconds):
            end = float(search.table.end[cell])
            first, last = (int(edge) for edge in search._interval(np.array(cell))[1:])
            found.append((cell[0], first, last, seconds, end))
    return found


def _partition_program(
    tables: columns.Columns, options: list[Option], solver: str, limit: float
) -> tuple[float | None, str]:
    """min sum T + (m - 1) max T + max E over paths through the options, with big-M-free rows."""
    from ortools.math_opt import model_pb2

    proto = model_pb2.ModelProto(name="stages")
    count = len(options) + 2
    slowest, longest = count - 2, count - 1
    scale = 1e3
    proto.variables.ids.extend(range(count))
    proto.variables.lower_bounds.extend([0.0] * count)
    proto.variables.upper_bounds.extend([1.0] * len(options) + [1e6, 1e6])
    proto.variables.integers.extend([True] * len(options) + [False, False])
    rows: dict[tuple[str, int, int], dict[int, float]] = {}
    for index, (stage, first, end, seconds, late) in enumerate(options):
        rows.setdefault(("node", stage, first), {})[index] = 1.0
        rows.setdefault(("node", stage + 1, end), {})[index] = -1.0
        rows.setdefault(("slow", stage, 0), {slowest: -1.0})[index] = scale * seconds
        rows.setdefault(("late", stage, 0), {longest: -1.0})[index] = scale * late
    entries: list[tuple[int, int, float]] = []
    for number, ((kind, stage, block), terms) in enumerate(rows.items()):
        proto.linear_constraints.ids.append(number)
        start = kind == "node" and (stage, block) == (0, 0)
        stop = kind == "node" and (stage, block) == (tables.stages, tables.blocks)
        level = 1.0 if start else -1.0 if stop else 0.0
        proto.linear_constraints.lower_bounds.append(level if kind == "node" else -math.inf)
        proto.linear_constraints.upper_bounds.append(level)
        entries += [(number, column, terms[column]) for column in sorted(terms)]
    proto.linear_constraint_matrix.row_ids.extend([e[0] for e in entries])
    proto.linear_constraint_matrix.column_ids.extend([e[1] for e in entries])
    proto.linear_constraint_matrix.coefficients.extend([e[2] for e in entries])
    proto.objective.linear_coefficients.ids.extend(range(count))
    weights = [scale * o[3] for o in options] + [float(tables.microbatches - 1), 1.0]
    proto.objective.linear_coefficients.values.extend(weights)
    values, note = _solve(proto, solver, limit)
    if values is None:
        return None, note
    taken = [o for o, v in zip(options, values, strict=False) if v > 0.5]
    slow, late = max(o[3] for o in taken), max(o[4] for o in taken)
    return sum(o[3] for o in taken) + (tables.microbatches - 1) * slow + late, note
