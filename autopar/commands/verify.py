"""`autopar verify`: the distributed program against one device, on local ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from autopar.errors import NotEqualError, PlanError, UsageError
from autopar.plan_document import Plan
from autopar.workflow.verification import Case, Verdict, verify_case

SHOWN = 10


@dataclass(frozen=True)
class VerifyRequest:
    """What the user asked for, as given."""

    model: str
    nproc: int
    plan: Path | None
    pins: str
    sequence: int | None
    global_batch: int | None
    memory_limit: str | None
    steps: int
    timeout: float


def verify_command(request: VerifyRequest, *, as_json: bool) -> int:
    """Print the comparison; 0 only if loss and all gradients are equal."""
    from autopar.runtime.launch import spawn

    case = _case(request)
    verdicts = spawn(verify_case, request.nproc, (case,), timeout_seconds=request.timeout)
    verdict: Verdict = verdicts[0]
    if as_json:
        print(json.dumps(verdict.to_dict(), indent=2))
    else:
        _print(verdict)
    return 0 if verdict.equal else NotEqualError.exit_code


def _case(request: VerifyRequest) -> Case:
    """The case to run, refused before any process starts when it can't work."""
    if request.nproc < 1:
        raise UsageError(f"--nproc {request.nproc}", next_step="start at least one rank")
    plan = Plan.load(request.plan) if request.plan else None
    if plan is not None and request.pins:
        raise UsageError(
            "--plan and --pin together", next_step="a plan holds every decision: drop --pin"
        )
    if plan is not None and plan.mesh.size != request.nproc:
        raise PlanError(
            f"the plan is for {plan.mesh.size} ranks ({plan.mesh}), --nproc is {request.nproc}",
            next_step=f"use --nproc {plan.mesh.size}, or plan for cpu:{request.nproc}",
        )
    sequence = request.sequence
    if plan is not None:
        sequence = plan.sizes.get("sequence", sequence)
    elif sequence is None and request.model.startswith(("zoo:", "hf:")):
        sequence = 64
    _check_size(request.model, sequence, request.nproc)
    batch = request.global_batch or (plan.global_batch if plan else 2 * request.nproc)
    plan = plan or _search(request, sequence, batch)
    return Case(
        model=request.model,
        plan=plan.to_dict(),
        global_batch=batch,
        sequence=sequence,
        steps=request.steps,
    )


def _search(request: VerifyRequest, sequence: int | None, batch: int) -> Plan:
    """The plan to verify, made here: pins that can't work are refused before any process starts."""
    from autopar.api import plan as find
    from autopar.models import resolve_model

    pins = request.pins
    if "tp=" in pins and "weights=" not in pins:
        # A toy is fastest with whole weights; what is to be verified is the split program.
        pins += ",weights=split"
    source = resolve_model(request.model, sequence=sequence, dtype=torch.float32)
    return find(
        source.model,
        f"cpu:{request.nproc}",
        example_inputs=source.example_inputs,
        loss_fn=source.loss_fn,
        global_batch_size=batch,
        pins=pins,
        memory_limit=request.memory_limit,
        name=source.name,
    )


def _check_size(model: str, sequence: int | None, nproc: int) -> None:
    """Every rank builds the model to compare with: refuse what can't be held that many times."""
    import os

    from autopar.models import resolve_model
    from autopar.units import format_bytes

    source = resolve_model(model, sequence=sequence, dtype=torch.float32)
    # The model and its copy on every rank; gradients and shards on top.
    need = 4 * nproc * sum(p.numel() * p.element_size() for p in source.model.parameters())
    have = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if need > 0.8 * have:
        raise UsageError(
            f"verifying {model} on {nproc} ranks needs about {format_bytes(need)}, this machine "
            f"has {format_bytes(have)}",
            next_step="verify a smaller configuration of the same architecture",
        )


def _print(verdict: Verdict) -> None:
    print(f"plan      {verdict.plan}")
    print(
        f"loss      {verdict.loss:.8g}   one device {verdict.reference_loss:.8g}   "
        f"relative error {verdict.loss_error:.2g}"
    )
    order = sorted(verdict.gradients, key=lambda n: -verdict.gradients[n])
    print(f"gradients {len(order)} compared, tolerance {verdict.tolerance:g}; the worst:")
    for name in order[:SHOWN]:
        print(f"  {verdict.gradients[name]:.2e}  {name}")
    if verdict.step_losses:
        print(
            f"steps     {len(verdict.step_losses)}, "
            f"parameters differ by {verdict.parameter_error:.2g}"
        )
    print("EQUAL" if verdict.equal else "NOT EQUAL")
