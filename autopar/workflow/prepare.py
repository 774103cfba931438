"""The front half of the passes, and how the samples of a step may be spread."""

from __future__ import annotations

from dataclasses import replace

from autopar.errors import CaptureError
from autopar.parts import Parts
from autopar.passes.analysis.batch_statistics import is_batch_norm, updates_of_batch
from autopar.passes.analysis.coupled_samples import (
    COUNTED,
    Statistics,
    batch_statistics,
    counts_in_backward,
    coupling_op,
)
from autopar.passes.analysis.loss_form import loss_form, loss_remedy
from autopar.passes.pass_manager import run_passes
from autopar.passes.pipeline import front_pipeline
from autopar.program import Program, copy_graph, module_path, user_line


def prepare(program: Program, sizes: dict[str, int]) -> Program:
    """The front half of the passes: what the search and the back half start from. Raises
    `CaptureError` where a step would train nothing."""
    check_trained(program)
    own = program.with_graph(copy_graph(program.graph_module))
    parts, _ = run_passes(Parts(own, sizes=sizes), front_pipeline())
    if parts.program.batch_stays_whole:
        return parts.program
    together, statistics = _why_together(parts.program)
    whole = "" if together else _why_whole(parts.program)
    if whole and not updates_of_batch(parts.program):
        together, statistics = _why_combined(parts.program)
    if together:
        return _with(replace(parts.program, one_micro_batch=together), statistics)
    return replace(parts.program, batch_stays_whole=whole)


_NONE = Statistics(frozenset(), frozenset())


def check_trained(program: Program) -> None:
    """Raise `CaptureError` where no gradient of the loss reaches a parameter."""
    loss = next(n for n in program.graph.nodes if n.name == program.loss)
    if loss.meta["requires_grad"]:
        return
    inputs = {n.name: n for n in program.graph.find_nodes(op="placeholder")}
    held = program.of_kind("parameter")
    trained = [i.target for i in held if inputs[i.name].meta["requires_grad"]]
    if not held:
        why = "it has no parameters"
    elif not trained:
        why = f"all of its {len(held)} parameters have requires_grad=False"
    else:
        why = f"its loss does not depend on {trained[0]}, nor on another trained parameter"
    raise CaptureError(
        f"a step of {program.name} trains nothing: {why}",
        next_step="plans are of training steps: let the loss depend on a parameter with "
        "requires_grad=True",
    )


def _why_together(program: Program) -> tuple[str, Statistics]:
    """Why all samples of a step must pass together although they may be spread over dp, and the
    statistics to sum then; '' when they need not, or may not be spread."""
    norm = next((n for n in program.graph.nodes if is_batch_norm(n)), None)
    moved = updates_of_batch(program)
    if (norm is None and not moved) or loss_form(program).kind == "unknown":
        return "", _NONE
    found = batch_statistics(program)
    if found is None:
        return "", _NONE
    if norm is not None:
        where = module_path(norm) or user_line(norm)
        return f"the batch norm {where!r} takes statistics of the whole batch", found
    return f"a step changes the buffer {moved[0]!r}", found


def _with(program: Program, found: Statistics) -> Program:
    return replace(program, batch_statistics=found.names, batch_sums=found.added)


def _why_combined(program: Program) -> tuple[str, Statistics]:
    """As `_why_together`, where samples meet in means and sums over the batch alone, as in the
    losses that balance the load of experts."""
    found = batch_statistics(program)
    if not found or not found.names or loss_form(_with(program, found)).kind == "unknown":
        return "", _NONE
    op = next(n for n in program.graph.nodes if n.name in found.names)
    where = user_line(op) or module_path(op)
    return f"samples meet in {op.name}{f' ({where})' if where else ''}, over the whole batch", found


def _why_whole(program: Program) -> str:
    """Why the loss of a batch does not follow from those of its parts; '' when it does."""
    if moved := updates_of_batch(program):
        return f"a step changes the buffer {moved[0]!r}"
    if loss_form(program).kind == "unknown":
        remedy = loss_remedy(program)
        why = "the loss is no mean or sum over samples that could be recognised"
        return f"{why} ({remedy})" if remedy else why
    if (op := coupling_op(program)) is None:
        return ""
    where = f"{op.name} ({user_line(op) or module_path(op)})"
    if counts_in_backward(op):
        return f"{COUNTED} counts indices of the whole batch in {where}"
    return f"samples depend on each other in {where}"
