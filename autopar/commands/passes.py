"""`autopar passes`: the list of passes, and printed graphs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autopar.errors import UsageError

if TYPE_CHECKING:
    from autopar.passes.pass_manager import Pass


def passes_command(
    model: str | None,
    dump_after: list[str],
    plan: Path | None,
    cluster: str,
    global_batch: int | None,
    pins: str,
    sequence: int | None,
) -> int:
    """Without a model, list; with one, run all passes and print what was asked for."""
    from autopar.passes.pipeline import back_pipeline, front_pipeline

    front, back = front_pipeline(), back_pipeline()
    names = [p.name for p in (*front, *back)]
    unknown = [n for n in dump_after if n not in (*names, "capture")]
    if unknown:
        raise UsageError(
            f"no pass {unknown[0]!r}", next_step=f"passes are capture, {', '.join(names)}"
        )
    if model is None:
        if dump_after:
            raise UsageError(
                "--dump-after needs a MODEL", next_step="autopar passes MODEL --dump-after NAME"
            )
        _list(front, back)
        return 0
    _dump(model, dump_after or [names[-1]], plan, cluster, global_batch, pins, sequence)
    return 0


def _list(front: list[Pass], back: list[Pass]) -> None:
    print("capture                nn.Module -> Program (torch.export on the meta device)")
    for step in front:
        print(f"{step.name:<22} {_first_line(step)}")
    print("(search)               Program -> Plan")
    for step in back:
        print(f"{step.name:<22} {_first_line(step)}")


def _first_line(step: object) -> str:
    import sys

    text = sys.modules[type(step).__module__].__doc__ or ""
    return text.strip().splitlines()[0]


def _dump(
    model: str,
    dump_after: list[str],
    path: Path | None,
    cluster: str,
    global_batch: int | None,
    pins: str,
    sequence: int | None,
) -> None:
    import autopar.runtime.collectives  # noqa: F401 - registers the ops that the passes insert
    from autopar.api import COMPUTE, chosen
    from autopar.commands.plan import PlanRequest, find_plan
    from autopar.models import resolve_model
    from autopar.parts import Parts
    from autopar.passes.capture import capture
    from autopar.passes.pass_manager import run_passes
    from autopar.passes.pipeline import back_pipeline, front_pipeline
    from autopar.passes.verify import verify
    from autopar.plan_check import check_plan
    from autopar.plan_document import Plan

    if path is not None:
        plan = Plan.load(path)
    else:
        request = PlanRequest(
            model, cluster, global_batch or 8, sequence, None, pins, None, "adamw", None
        )
        outcome, _ = find_plan(request, quiet=True)
        plan = chosen(outcome)
    dtype = COMPUTE[plan.precision]
    source = resolve_model(model, sequence=plan.sizes.get("sequence"), dtype=dtype)
    program = capture(
        source.model, source.example_inputs, name=source.name, dtype=dtype, loss_fn=source.loss_fn
    )
    parts = Parts(program, plan, dict(plan.sizes))
    dumps = {"capture": parts.text()}
    parts, front = run_passes(parts, front_pipeline(), dump_after=dump_after)
    check_plan(plan, parts.program)
    parts, back = run_passes(parts, back_pipeline(), verify=verify, dump_after=dump_after)
    dumps |= front.dumps | back.dumps
    for name in dump_after:
        print(f"### after {name}\n{dumps[name]}")
