"""Whether a plan, perhaps edited by hand, fits a program."""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.plan_consistency import (
    check_batch,
    check_expert_groups,
    check_order,
    check_schedule,
    check_shards,
    check_stages,
)
from autopar.plan_document import Plan
from autopar.program import Program

# An input is batched when its dim 0 has the size that most inputs share.
NO_BATCH = "if an input is no batch, give example_inputs of another number of rows than its dim 0"


def check_plan(plan: Plan, program: Program, global_batch_size: int | None = None) -> None:
    """Raises `PlanError` naming the field that does not fit, and what would."""
    if plan.fingerprint != program.fingerprint():
        raise PlanError(
            f"the plan was made for another model or another shape of it: {plan.model!r} with "
            f"fingerprint {plan.fingerprint}, this one has {program.fingerprint()}",
            next_step="make the plan again for this model, precision and inputs",
        )
    if global_batch_size is not None and global_batch_size != plan.global_batch:
        raise PlanError(
            f"global_batch_size is {global_batch_size}, the plan is for {plan.global_batch}",
            next_step="pass the plan's global batch, or plan again",
        )
    check_batch(plan)
    check_order(plan)
    check_expert_groups(plan)
    check_shards(plan)
    if program.batch_stays_whole and plan.mesh.dp * plan.microbatches > 1:
        raise PlanError(
            f"dp {plan.mesh.dp} x microbatches {plan.microbatches}, but "
            f"{program.batch_stays_whole}",
            next_step="return F.cross_entropy, a mean or a sum over independent samples; or use "
            f"dp 1 and one microbatch; {NO_BATCH}",
        )
    if program.one_micro_batch and plan.microbatches > 1:
        raise PlanError(
            f"microbatches is {plan.microbatches}, but {program.one_micro_batch}",
            next_step="use one micro-batch; it may be spread over dp ranks",
        )
    if plan.zero and plan.mesh.replicas > 1 and (scalar := program.scalar_parameter()):
        raise PlanError(
            f"zero is {plan.zero}, but parameter {scalar!r} has no dims and can't be sharded",
            next_step="make it a tensor of one element (torch.zeros(1)), or set zero to 0",
        )
    if "batch" not in program.symbols and plan.microbatch != program.sizes["batch"]:
        raise PlanError(
            f"the model was captured with a fixed batch of {program.sizes['batch']}, the plan has "
            f"microbatches of {plan.microbatch}",
            next_step="give example_inputs with the plan's microbatch size",
        )
    check_schedule(plan)
    check_stages(plan)
