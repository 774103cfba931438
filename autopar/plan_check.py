"""Whether a plan, perhaps edited by hand, fits a program."""

from __future__ import annotations

from autopar.errors import PlanError
from autopar.plan_document import Plan
from autopar.program import Program


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
    product = plan.mesh.dp * plan.microbatch * plan.microbatches
    if product != plan.global_batch:
        raise PlanError(
            f"dp {plan.mesh.dp} x microbatch {plan.microbatch} x microbatches "
            f"{plan.microbatches} = {product}, but the global batch is {plan.global_batch}",
            next_step="edit one of the four so that the product fits",
        )
    if program.batch_stays_whole and plan.mesh.dp * plan.microbatches > 1:
        raise PlanError(
            f"dp {plan.mesh.dp} x microbatches {plan.microbatches}, but "
            f"{program.batch_stays_whole}",
            next_step="return F.cross_entropy, a mean or a sum over independent samples; or use "
            "dp 1 and one microbatch",
        )
    if plan.zero and plan.mesh.dp > 1 and (scalar := program.scalar_parameter()):
        raise PlanError(
            f"zero is {plan.zero}, but parameter {scalar!r} has no dims and can't be sharded",
            next_step="make it a tensor of one element (torch.zeros(1)), or set zero to 0",
        )
    if plan.sizes.get("batch") != plan.microbatch:
        raise PlanError(
            f"sizes.batch is {plan.sizes.get('batch')}, the microbatch is {plan.microbatch}",
            next_step="set both to the same number",
        )
    if "batch" not in program.symbols and plan.microbatch != program.sizes["batch"]:
        raise PlanError(
            f"the model was captured with a fixed batch of {program.sizes['batch']}, the plan has "
            f"microbatches of {plan.microbatch}",
            next_step="give example_inputs with the plan's microbatch size",
        )
    if len(plan.stages) != plan.mesh.pp:
        raise PlanError(
            f"mesh.pp is {plan.mesh.pp}, but there are {len(plan.stages)} stages",
            next_step="give one entry of `stages` for each pipeline stage",
        )
