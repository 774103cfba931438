"""`plan` and `compile`: the whole road on one page.

model ── capture ──> Program ── front passes ──> prices ── search ──> Plan
      ── back passes ──> one program per stage ── runtime ──> step(batch)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autopar.adapters import with_adapters
from autopar.cluster import Cluster
from autopar.cost.setting import PRECISION
from autopar.errors import UsageError
from autopar.inputs import Inputs
from autopar.loss_function import LossFunction
from autopar.mesh import Mesh
from autopar.parts import Parts
from autopar.passes.capture import capture
from autopar.passes.pass_manager import run_passes
from autopar.passes.pipeline import back_pipeline
from autopar.passes.rewrite.place_on_device import place_on_device
from autopar.passes.verify import verify
from autopar.plan_check import check_plan
from autopar.plan_document import Plan
from autopar.program import Program
from autopar.search.enumerate import search
from autopar.search.infeasible import explain_infeasible, infeasible_error
from autopar.search.options import Pins, SearchOptions, parse_pins
from autopar.search.progress import Progress
from autopar.units import check_sequence, parse_bytes
from autopar.workflow.explanation import Explanation, explanation
from autopar.workflow.forced_pins import with_forced_pins
from autopar.workflow.model_costs import ModelCosts
from autopar.workflow.other_prices import OtherPrices, Recapture
from autopar.workflow.outcome import Outcome, build_plan
from autopar.workflow.prepare import prepare
from autopar.workflow.world import decide_on_first_rank, world_cluster, world_size

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from autopar.runtime.program import DistributedProgram

COMPUTE: dict[str, torch.dtype] = {n: getattr(torch, p.dtype) for n, p in PRECISION.items()}


def plan(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    example_inputs: Inputs,
    global_batch_size: int,
    memory_limit: int | str | None = None,
    pins: str | Pins = "",
    precision: str | None = None,
    optimizer: str = "adamw",
    loss_fn: LossFunction | None = None,
    spare_experts: int = 0,
    sequence: int | None = None,
    time_limit: float | None = None,
    name: str = "",
) -> Plan:
    """The proven best plan for a model on a cluster. Needs no process group and no GPU.

    `example_inputs`: keyword inputs (mapping) or positional ones (sequence), nested if need be, dim
    0 of the tensors the batch. `loss_fn(outputs, **inputs)`: for a model that returns no loss; it
    gets the inputs that it names, the model gets the others.
    `global_batch_size`: samples of one optimizer step over all ranks. `memory_limit`: bytes per
    rank for the five memory terms (or a text such as "70GiB"). `pins`: decisions to keep, as
    "tp=8,zero=1". `precision`: fp32, bf16-mixed, bf16 or fp16 (default: that of the parameters).
    `optimizer`: whose states are counted: adamw, adamw-host (offloaded), adamw-8bit, adafactor, sgd
    or sgd-momentum.
    `spare_experts`: slots of every rank beyond its part of a layer's experts, where ranks split
    them: room for copies of hot experts and for unequal counts (`program.rebalance`).
    `sequence`: plan for another length of dim 1 than the example's. `name`: of the model, in the
    plan.
    Raises `InfeasibleError` when nothing fits, `CaptureError` or `UsageError` for bad input.
    """
    outcome = search_plan(
        model,
        cluster,
        example_inputs=example_inputs,
        global_batch_size=global_batch_size,
        memory_limit=memory_limit,
        pins=pins,
        precision=precision,
        optimizer=optimizer,
        loss_fn=loss_fn,
        spare_experts=spare_experts,
        sequence=sequence,
        time_limit=time_limit,
        name=name,
    )
    return chosen(outcome)


def chosen(outcome: Outcome) -> Plan:
    """The plan of an outcome; raises `InfeasibleError` when there is none."""
    if outcome.plan is None:
        raise infeasible_error(outcome.result)
    return outcome.plan


def search_plan(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    example_inputs: Inputs,
    global_batch_size: int,
    memory_limit: int | str | None = None,
    pins: str | Pins = "",
    precision: str | None = None,
    optimizer: str = "adamw",
    loss_fn: LossFunction | None = None,
    spare_experts: int = 0,
    sequence: int | None = None,
    time_limit: float | None = None,
    name: str = "",
    progress: Callable[[Progress], None] | None = None,
) -> Outcome:
    """`plan` with everything the search knows; an impossible request is an outcome, not an
    error."""
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    precision = precision or default_precision(model)
    compute_dtype(precision)
    if not isinstance(pins, str | Pins):
        raise UsageError(
            f"pins are of type {type(pins).__name__}",
            next_step='give a text, as "tp=8,zero=1"',
        )

    def captured(other_precision: str, adapters: int = 0) -> Program:
        dtype, trained = compute_dtype(other_precision), model
        if adapters:
            trained = with_adapters(model, adapters)
        return capture(trained, example_inputs, name=name, dtype=dtype, loss_fn=loss_fn)

    start = time.perf_counter()
    program = captured(precision)
    return search_program(
        program,
        cluster,
        global_batch_size=global_batch_size,
        memory_limit=memory_limit,
        pins=pins,
        precision=precision,
        optimizer=optimizer,
        spare_experts=spare_experts,
        sequence=sequence,
        time_limit=time_limit,
        progress=progress,
        capture_seconds=time.perf_counter() - start,
        recapture=captured,
    )


def search_program(
    program: Program,
    cluster: Cluster,
    *,
    global_batch_size: int,
    memory_limit: int | str | None = None,
    pins: str | Pins = "",
    precision: str = "fp32",
    optimizer: str = "adamw",
    spare_experts: int = 0,
    sequence: int | None = None,
    time_limit: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    capture_seconds: float = 0.0,
    recapture: Recapture | None = None,
    explain: bool = True,
) -> Outcome:
    """`search_plan` from a captured program. `recapture` gives the program in another
    precision or with adapters; `explain=False` finds the plan alone: no other plans, nor what would
    make one possible."""
    options = SearchOptions(
        global_batch=global_batch_size,
        precision=precision,
        optimizer=optimizer,
        memory_limit=parse_bytes(memory_limit) if isinstance(memory_limit, str) else memory_limit,
        pins=parse_pins(pins) if isinstance(pins, str) else pins,
        time_limit=time_limit,
        spare_experts=spare_experts,
    )
    start = time.perf_counter()
    sizes, captured = planned_sizes(program, sequence), program
    program = prepare(captured, sizes)

    options = with_forced_pins(options, program)
    costs = model_costs(program, cluster, sizes, options)
    analysed = time.perf_counter() - start
    result = search(costs, cluster, options, progress, explain=explain)
    seconds = {
        "capture": capture_seconds,
        "analyse": analysed + result.provider_seconds,
        "search": result.seconds,
    }
    if result.choice is None:
        if explain:

            def price(other: Program, of: dict[str, int]) -> ModelCosts:
                return model_costs(prepare(other, of), cluster, of, options)

            others = OtherPrices(captured, sizes, precision, costs, recapture, price)
            result = explain_infeasible(result, costs, cluster, options, others)
        return Outcome(None, result, program, seconds)
    flops = costs.flops_per_sample(result.choice.microbatch)
    kinds, notes = costs.blocks.kinds, costs.all_notes()
    more = explanation(costs, result.choice, seconds) if explain else Explanation()
    known_of = program, cluster, result, sizes, global_batch_size, kinds, flops, seconds, notes
    found = build_plan(*known_of, more, options.spare_experts)
    return Outcome(found, result, program, seconds)


def model_costs(
    program: Program, cluster: Cluster, sizes: dict[str, int], options: SearchOptions
) -> ModelCosts:
    """Prices of a prepared program under the options that concern placements."""
    pins, spare = options.pins, options.spare_experts
    split = pins.weights == "split"
    return ModelCosts(
        program, cluster, sizes, boundary=pins.boundary, split_weights=split, spare_experts=spare
    )


def compile(  # noqa: A001 - the name users look for
    model: nn.Module,
    mesh: Cluster | DeviceMesh | str | None = None,
    *,
    example_inputs: Inputs,
    global_batch_size: int,
    plan: Plan | str | Path | None = None,
    memory_limit: int | str | None = None,
    pins: str | Pins = "",
    precision: str | None = None,
    optimizer: str = "adamw",
    loss_fn: LossFunction | None = None,
    spare_experts: int = 0,
    timeout_seconds: float = 300.0,
    seed: int = 0,
) -> DistributedProgram:
    """The distributed program of this rank; the same call on every rank, under torchrun.

    `mesh`: a `Cluster`, a `DeviceMesh` (dims named pp, dp, cp, tp pin degrees, and where its ranks
    lie the order of these axes; dp_replicate and dp_shard in place of dp say over how many ranks
    ZeRO shards), or None to read the ranks from torchrun. `plan`: a plan or plan file; without one,
    rank 0 searches and all ranks get its plan. `timeout_seconds` bounds every wait for another
    rank. `seed`: of the weights of a model on the meta device. The model is not changed; only this
    rank's shards of it are materialised.
    """
    from autopar.runtime.ranks import Ranks

    # Before there is a plan all ranks are alike: a mesh with one axis is enough to talk.
    world = Ranks.create(Mesh(dp=world_size()), timeout_seconds=timeout_seconds)

    searched: list[Program] = []  # on rank 0: it need not capture again what it searched

    def decide() -> Plan:
        if plan is not None:
            return plan if isinstance(plan, Plan) else Plan.load(plan)
        cluster, pinned = world_cluster(mesh, world.mesh.size, world.device.type, pins)
        outcome = search_plan(
            model,
            cluster,
            example_inputs=example_inputs,
            global_batch_size=global_batch_size,
            memory_limit=memory_limit,
            pins=pinned,
            precision=precision,
            optimizer=optimizer,
            loss_fn=loss_fn,
            spare_experts=spare_experts,
        )
        searched.append(outcome.program)
        return chosen(outcome)

    decided = decide_on_first_rank(world, decide)
    return build(
        model,
        decided,
        global_batch_size,
        lambda: searched[0] if searched else prepared(model, example_inputs, decided, loss_fn),
        timeout_seconds=timeout_seconds,
        seed=seed,
    )


def prepared(
    model: nn.Module, example_inputs: Inputs, plan: Plan, loss_fn: LossFunction | None = None
) -> Program:
    """Capture and the front passes, for a plan that is decided."""
    dtype = COMPUTE[plan.precision]
    program = capture(model, example_inputs, name=plan.model, dtype=dtype, loss_fn=loss_fn)
    return prepare(program, plan.sizes)


def build(
    model: nn.Module,
    plan: Plan,
    global_batch_size: int,
    program_for: Callable[[], Program],
    *,
    timeout_seconds: float = 300.0,
    seed: int = 0,
) -> DistributedProgram:
    """The second half of `compile`: rewrite for the plan, agree with all ranks, make this rank's
    part."""
    from autopar.runtime.digests import weights_digest
    from autopar.runtime.program import DistributedProgram
    from autopar.runtime.ranks import Ranks, agree, together

    ranks = Ranks.create(plan.mesh, timeout_seconds=timeout_seconds)
    error: Exception | None = None
    try:
        program = program_for()
        check_plan(plan, program, global_batch_size)
        parts = rewrite_for(program, plan)
    except Exception as found:
        error = found
    together(ranks, error)
    agree(ranks, f"{program.fingerprint()} {plan.decisions()}", weights_digest(model))
    groups = ranks.group_names()
    for index in plan.stage_indexes(ranks.index("pp")):
        place_on_device(parts.stages[index], ranks.device, groups)
    return DistributedProgram(parts.stages, plan, ranks, model, seed=seed)


def rewrite_for(program: Program, plan: Plan) -> Parts:
    """The back half of the passes: a prepared program and a plan to one program per stage."""
    import autopar.runtime.collectives  # noqa: F401 - registers the ops that the passes insert

    parts, _ = run_passes(Parts(program, plan, dict(plan.sizes)), back_pipeline(), verify=verify)
    return parts


def planned_sizes(program: Program, sequence: int | None) -> dict[str, int]:
    """Sizes of the program's symbols: those of the example, with another sequence if asked for."""
    sizes = dict(program.sizes)
    check_sequence(sequence)
    if sequence is not None and sequence != sizes.get("sequence"):
        if "sequence" not in program.symbols:
            raise UsageError(
                f"the model was captured with a fixed sequence of {sizes.get('sequence')}",
                next_step=f"give example_inputs of sequence {sequence}",
            )
        sizes["sequence"] = sequence
    return sizes


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype that a precision computes in; raises `UsageError` for an unknown one."""
    if precision not in COMPUTE:
        raise UsageError(f"precision={precision}", next_step=f"choose one of {', '.join(COMPUTE)}")
    return COMPUTE[precision]


def default_precision(model: nn.Module) -> str:
    """fp32, bf16 or fp16, by the dtype of most parameters."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    most = max(counts, key=lambda k: counts[k], default=torch.float32)
    # A mixed precision is asked for by name: parameters alone don't tell it.
    pure = {COMPUTE[name]: name for name, p in PRECISION.items() if p.storage == p.compute}
    if most not in pure:
        raise UsageError(
            f"parameters are {most}",
            next_step="use float32, bfloat16 or float16 parameters, or give precision=",
        )
    return pure[most]


def launch(
    function: Callable[..., Any], nproc: int, *args: Any, timeout_seconds: float = 600.0
) -> list[Any]:
    """Run `function(*args)` on `nproc` local ranks and return their results in rank order.

    A rank that fails or dies ends all of them within seconds, as one error.
    """
    from autopar.runtime.launch import spawn

    return spawn(function, nproc, args, timeout_seconds=timeout_seconds)
