"""Run one architecture: capture, the captured graph against the model, then plans on two ranks."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.api import build
from autopar.cluster import Cluster
from autopar.errors import AutoparError, UsageError
from autopar.inputs import flatten_inputs
from autopar.loss_function import loss_of
from autopar.models import ModelSource
from autopar.passes.capture import capture
from autopar.passes.rewrite.place import PARAMETER
from autopar.piece_name import parse_piece
from autopar.plan_document import Plan
from autopar.program import GraphInput, Program, copy_graph
from autopar.search.enumerate import search
from autopar.search.infeasible import explain_infeasible, infeasible_error
from autopar.search.options import SearchOptions, parse_pins
from autopar.workflow.forced_pins import forced_pins
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.outcome import build_plan
from autopar.workflow.prepare import prepare
from autopar.workflow.verification import Case, Verdict, compare_with_one_device, random_batch
from benchmarks.zoo.architecture import BATCH, Architecture, Toy
from benchmarks.zoo.ranks import fork

PLANS = {
    "TP": "tp=2,pp=1,dp=1",
    "PP": "tp=1,pp=2,dp=1",
    "ZeRO": "tp=1,pp=1,dp=2,zero=3",
}
TOLERANCE = 1e-5
RANKS, SEED, TIMEOUT_SECONDS = 2, 0, 180.0


@dataclass
class Row:
    """What the table says: a cell for each column, `equal` or the reason in words."""

    name: str
    family: str
    capture: str = ""
    cells: dict[str, str] = field(default_factory=dict)
    replicated: tuple[str, ...] = ()
    seconds: float = 0.0
    step_seconds: dict[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        return any(c.startswith("FAILED") for c in (self.capture, *self.cells.values()))


def verify_architecture(architecture: Architecture) -> Row:
    """All columns of one architecture. Never raises for what a model or plan can't do."""
    start = time.perf_counter()
    row = Row(architecture.name, architecture.family)
    torch.manual_seed(SEED)
    toy = architecture.make()
    try:
        program = capture(
            toy.model, toy.inputs, name=row.name, dtype=torch.float32, loss_fn=toy.loss
        )
    except AutoparError as error:
        row.capture = f"refused: {error.message}"
        row.seconds = time.perf_counter() - start
        return row
    try:
        plans = Plans(program)
        error = captured_error(plans.program, toy)
        good = error <= TOLERANCE
        row.capture = "equal" if good else f"FAILED: differs by {error:.2g}"
        if good:
            _run_plans(row, toy, plans)
    # A row for each architecture, whatever happens: a fault is written into the table.
    except Exception as fault:
        column = "capture" if not row.capture else "TP"
        text = f"FAILED: {type(fault).__name__}: {fault}"[:300]
        if column == "capture":
            row.capture = text
        else:
            row.cells[column] = text
    row.seconds = time.perf_counter() - start
    return row


def captured_error(program: Program, toy: Toy) -> float:
    """Largest relative error of loss and gradients of a captured graph, on the example itself."""
    model, eager = copy.deepcopy(toy.model), copy.deepcopy(toy.model)
    torch.manual_seed(SEED)  # a model that draws at random draws the same both times
    expected = loss_of(eager, toy.inputs, toy.loss)
    torch.autograd.backward(expected)
    torch.manual_seed(SEED)
    loss = _run_graph(program, model, flatten_inputs(toy.inputs)[0])
    torch.autograd.backward(loss)
    wanted = {n: p.grad for n, p in eager.named_parameters() if p.grad is not None}
    got = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    total = float(torch.stack([g.norm() for g in wanted.values()]).norm())
    with torch.no_grad():
        errors = [float((loss - expected).abs() / expected.abs().clamp_min(1e-12))]
    for name in {*wanted, *got}:
        difference = wanted.get(name, 0) - got.get(name, torch.zeros(()))
        errors.append(float(torch.as_tensor(difference).norm()) / total)
    return max(errors) if all(e == e for e in errors) else float("nan")


def _run_graph(
    program: Program, model: nn.Module, tensors: dict[str, torch.Tensor]
) -> torch.Tensor:
    graph = copy_graph(program.graph_module)
    for node in graph.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.update_kwarg("device", torch.device("cpu"))
        node.args = tuple(torch.device("cpu") if isinstance(a, torch.device) else a
                          for a in node.args)  # fmt: skip
    graph.recompile()
    values: dict[str, dict[str, torch.Tensor]] = {
        "parameter": dict(model.named_parameters(remove_duplicate=False)),
        "buffer": dict(model.named_buffers(remove_duplicate=False)),
        "input": tensors,
    }
    constants = program.constants

    def read(item: GraphInput) -> torch.Tensor:
        if item.kind == "constant":
            return constants[item.name]
        piece = parse_piece(item.target)
        if piece is None:
            return values[item.kind][item.target]
        whole = values[item.kind][piece.whole]
        return whole.narrow(piece.dim, piece.start, piece.stop - piece.start)

    arguments = [read(item) for item in program.inputs]
    loss: torch.Tensor = graph(*arguments)[0]
    return loss


def _run_plans(row: Row, toy: Toy, plans: Plans) -> None:
    source = ModelSource(row.name, toy.model, dict(toy.inputs), loss_fn=toy.loss)
    cases: dict[str, tuple[Case, Program]] = {}
    for column, pins in PLANS.items():
        row.replicated = tuple(plans.costs.unknown)
        try:
            plan = plans.plan(pins)
        except AutoparError as error:
            row.cells[column] = f"none: {error.message.splitlines()[0]}"
            continue
        case = Case(row.name, pins, plan=plan.to_dict(), global_batch=plan.global_batch)
        cases[column] = (case, plans.program)
        row.cells[column] = _split(plan) if column == "TP" else ""
    for column, (case, prepared) in cases.items():
        arguments = (toy.model, source, case, prepared)
        try:
            verdict, seconds = fork(run_case, RANKS, arguments, TIMEOUT_SECONDS)
        except RuntimeError as error:
            row.cells[column] = f"FAILED: {str(error).strip().splitlines()[-1]}"
            continue
        row.step_seconds[column] = seconds
        row.cells[column] = _cell(verdict, row.cells[column])


class Plans:
    """Plans of one program, searched under pins; prices are computed once for all of them."""

    def __init__(self, program: Program) -> None:
        self.program = prepare(program, program.sizes)
        self.cluster = Cluster.parse(f"cpu:{RANKS}")
        self.costs = ModelCosts(
            self.program, self.cluster, self.program.sizes, boundary="R", split_weights=True
        )

    def plan(self, pins: str) -> Plan:
        """Two micro-batches on a pipeline, or one where all samples have to pass together."""
        parsed = parse_pins(f"{pins},weights=split,boundary=R")
        whole = bool(self.program.batch_stays_whole)
        if whole and (parsed.dp or 1) > 1:
            why = self.program.batch_stays_whole
            raise UsageError(f"{why}: the batch is not split", next_step="pin dp=1")
        together = whole or bool(self.program.one_micro_batch)
        batch = BATCH * (parsed.dp or 1) if together else 2 * BATCH
        parsed = forced_pins(self.program, parsed, batch)
        count = 1 if together else batch // (BATCH * (parsed.dp or 1))
        options = SearchOptions(
            global_batch=batch,
            precision="fp32",
            optimizer="adamw",
            pins=replace(parsed, microbatches=count),
        )
        result = search(self.costs, self.cluster, options)
        if result.choice is None:
            raise infeasible_error(
                explain_infeasible(result, self.costs, self.cluster, options, lambda *_: None)
            )
        return build_plan(
            self.program,
            self.cluster,
            result,
            self.program.sizes,
            batch,
            self.costs.blocks.kinds,
            self.costs.flops_per_sample(result.choice.microbatch),
            {},
            self.costs.all_notes(),
        )


def _split(plan: Plan) -> str:
    """How many weights a rank holds a slice of, counted once per kind of block."""
    placed = [p for block in plan.placements.values() for n, p in block.items()
              if n.startswith(PARAMETER)]  # fmt: skip
    split = sum(p.startswith("S") for p in placed)
    if not split:
        return "but no weight is split: nothing that TP could share"
    return f"{split} of {len(placed)} weights split"


def _cell(verdict: Verdict, what: str) -> str:
    if verdict.error and not verdict.gradients:
        return f"FAILED: {verdict.error}"
    if not verdict.equal:
        why = verdict.error or f"loss {verdict.loss_error:.2g}, {verdict.worst} "
        return f"FAILED: {why}{verdict.worst_error:.2g}"
    return f"equal, {what}" if what else "equal"


def run_case(
    model: nn.Module, source: ModelSource, case: Case, prepared: Program
) -> tuple[Verdict, float]:
    """On each rank: one step, compared on rank 0; and the seconds of a second step."""
    assert case.plan is not None
    plan, own = Plan.from_dict(case.plan), copy.deepcopy(model)
    program = build(own, plan, case.global_batch, lambda: prepared, timeout_seconds=60.0)
    verdict = compare_with_one_device(case, program, own, copy.deepcopy(model), source)
    return verdict or Verdict(case), _time_step(program, source, model, case)


def _time_step(program: Any, source: ModelSource, model: nn.Module, case: Case) -> float:
    batch = random_batch(source, model, case.global_batch, case)
    start = time.perf_counter()
    program.step(batch)
    return time.perf_counter() - start
