"""Decisions that a program leaves no choice about, as pins."""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import UsageError
from autopar.plan_check import NO_BATCH
from autopar.program import Program
from autopar.search.options import Pins, SearchOptions


def with_forced_pins(options: SearchOptions, program: Program) -> SearchOptions:
    """The same request with the pins that the program asks for; see `forced_pins`."""
    return replace(
        options,
        pins=forced_pins(program, options.pins, options.global_batch),
        forced=forced_pins(program, Pins(), options.global_batch),
    )


def forced_pins(program: Program, pins: Pins, global_batch: int) -> Pins:
    """The user's pins and those that the program asks for; raises `UsageError` where they differ,
    or where it was captured for another batch."""
    if program.batch_stays_whole:
        check_fixed_batch(program, global_batch)
        pins = whole_batch(pins, program.batch_stays_whole)
    if program.one_micro_batch:
        pins = one_micro_batch(pins, program.one_micro_batch)
    if scalar := program.scalar_parameter():
        pins = without_zero(pins, scalar)
    return pins


def whole_batch(pins: Pins, reason: str) -> Pins:
    """Pins for a loss that can't be put together from parts of the batch, for a reason."""
    for name, value in (("dp", pins.dp), ("microbatches", pins.microbatches)):
        if value not in (None, 1):
            raise UsageError(
                f"{name}={value}, but {reason}: parts of the batch can't be combined",
                next_step="return F.cross_entropy, a mean or a sum over the batch; or leave the "
                f"batch whole (dp=1,microbatches=1); {NO_BATCH}",
            )
    return replace(pins, dp=1, microbatches=1)


def one_micro_batch(pins: Pins, reason: str) -> Pins:
    """Pins for a model of which all samples of a step have to pass together, on all dp ranks."""
    if pins.microbatches not in (None, 1):
        raise UsageError(
            f"microbatches={pins.microbatches}, but {reason}: all samples pass together",
            next_step="leave it to the planner, or pin microbatches=1",
        )
    return replace(pins, microbatches=1)


def check_fixed_batch(program: Program, global_batch: int) -> None:
    """Raises `UsageError` for another global batch than that of a program that holds for one."""
    rows = program.sizes["batch"]
    if "batch" not in program.symbols and rows != global_batch:
        raise UsageError(
            f"global batch {global_batch}, but the model was captured for a batch of {rows}: "
            f"{program.batch_stays_whole}",
            next_step=f"give example_inputs of {global_batch} rows, which then run as one batch; "
            f"{NO_BATCH}",
        )


def without_zero(pins: Pins, scalar: str) -> Pins:
    """Pins for a model with a parameter of no dims, which can't be sharded over dp."""
    if pins.zero not in (None, 0):
        raise UsageError(
            f"zero={pins.zero}, but parameter {scalar!r} has no dims and can't be sharded",
            next_step="make it a tensor of one element (torch.zeros(1)), or use zero=0",
        )
    return replace(pins, zero=0)
