"""Compare the distributed program with the user's own model on one device: loss, every gradient,
later steps."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar.errors import UsageError
from autopar.inputs import flatten_inputs, replace_tensors
from autopar.loss_function import LossFunction, loss_of
from autopar.models import ModelSource, resolve_model
from autopar.passes.capture_graph import batch_size
from autopar.plan_document import Plan
from autopar.program import Program

# Largest relative error that rounding alone explains, by dtype of the parameters.
TOLERANCE = {
    torch.float32: 1e-5,
    torch.bfloat16: 4e-2,
    torch.float16: 5e-3,
    torch.float64: 1e-11,
}
# A gradient this much smaller than the norm of all is compared with that norm: what is zero in
# theory (the bias of a key, or before a batch norm) is rounding, 6e-8 of the norm in float32.
NEGLIGIBLE = 1e-2


@dataclass(frozen=True)
class Case:
    """One comparison: a MODEL as on the command line, with a plan or with pins for a search."""

    model: str
    pins: str = ""
    plan: dict[str, Any] | None = None
    global_batch: int = 8
    sequence: int | None = None
    memory_limit: str | None = None
    steps: int = 0
    seed: int = 0
    ignore_every: int = 3


@dataclass
class Verdict:
    """Relative errors; `gradients[name]` of every parameter. `error` when the case could not
    run."""

    case: Case
    equal: bool = False
    plan: str = ""
    loss: float = 0.0
    reference_loss: float = 0.0
    loss_error: float = 0.0
    worst: str = ""
    worst_error: float = 0.0
    tolerance: float = 0.0
    gradients: dict[str, float] = field(default_factory=dict)
    step_losses: list[float] = field(default_factory=list)
    reference_step_losses: list[float] = field(default_factory=list)
    parameter_error: float = 0.0
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def build_real(text: str, sequence: int | None, seed: int) -> tuple[nn.Module, ModelSource]:
    """The model with real weights, the same on every rank, and where it came from."""
    torch.manual_seed(seed)
    source = resolve_model(text, sequence=sequence, dtype=torch.float32)
    if source.build is not None:
        return source.build("cpu").train(), source
    if any(p.is_meta for p in source.model.parameters()):
        raise UsageError(
            f"{text} returns a model on the meta device: there are no weights to compare",
            next_step="return a model with real weights",
        )
    return source.model, source


def random_batch(source: ModelSource, model: nn.Module, size: int, case: Case) -> dict[str, Any]:
    """A seeded global batch shaped like the example; some labels are ignored, unevenly.

    Tensors whose dim 0 is not the batch, and what is no tensor, are those of the example.
    """
    generator = torch.Generator().manual_seed(case.seed + 1)
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    tensors, _ = flatten_inputs(source.example_inputs)
    names = iter(tensors)
    rows = batch_size(tensors)

    def make(example: torch.Tensor) -> torch.Tensor:
        name = next(names)
        if not example.dim() or example.shape[0] != rows:
            return example
        made = _random_like(name, example, size, vocabulary, generator)
        if name == "labels" and made.dim() == 2 and case.ignore_every:
            for row in range(size):
                made[row, : (row * made.shape[1]) // (case.ignore_every * size)] = -100
        return made

    batch: dict[str, Any] = replace_tensors(dict(source.example_inputs), make)
    return batch


def _random_like(
    name: str, example: torch.Tensor, size: int, vocabulary: int | None, generator: torch.Generator
) -> torch.Tensor:
    """Noise, tokens, or other samples of whole numbers: rows of the example, in another order."""
    shape = (size, *example.shape[1:])
    if example.is_floating_point():
        return torch.randn(shape, generator=generator).to(example.dtype)
    if name in ("input_ids", "labels") and vocabulary and example.dim() == 2:
        return torch.randint(0, vocabulary, shape, generator=generator)
    if example.is_meta:
        return torch.zeros(shape, dtype=example.dtype)
    picks = torch.randint(0, example.shape[0], (size,), generator=generator)
    return example.cpu()[picks].clone()


def verify_case(case: Case) -> Verdict | None:
    """Run one case on this rank (all ranks call it); the verdict on rank 0, None elsewhere."""
    import autopar

    model, source = build_real(case.model, case.sequence, case.seed)
    reference = copy.deepcopy(model)
    program = autopar.compile(
        model,
        example_inputs=dict(source.example_inputs),
        loss_fn=source.loss_fn,
        global_batch_size=case.global_batch,
        plan=Plan.from_dict(case.plan) if case.plan else None,
        pins=case.pins,
        memory_limit=case.memory_limit,
        timeout_seconds=120.0,
    )
    return compare_with_one_device(case, program, model, reference, source)


def compare_with_one_device(
    case: Case, program: Any, model: nn.Module, reference: nn.Module, source: ModelSource
) -> Verdict | None:
    """One step of both on the same batch, then `case.steps` optimizer steps; the verdict on rank
    0."""
    import torch.distributed as dist

    from autopar.runtime.ranks import together

    given = replace(case, ignore_every=0) if program.even else case
    batch = random_batch(source, model, case.global_batch, given)
    loss = program.step(batch)
    gradients = program.full_gradients()
    buffers = _updated_buffers(program)
    verdict = Verdict(case, plan=describe(program.plan))
    first = dist.get_rank() == 0
    error: Exception | None = None
    if first:
        try:
            _compare(verdict, reference, batch, float(loss), gradients, source.loss_fn)
            _compare_buffers(verdict, reference, buffers)
        except Exception as found:  # the model itself may fail on one device
            error = found
    together(program.ranks, error)
    if case.steps:
        twin = reference if first else None
        _train(verdict if first else None, program, twin, batch, case.steps, source.loss_fn)
    return verdict if first else None


def _updated_buffers(program: Any) -> dict[str, torch.Tensor]:
    """The buffers that the step changed, of all stages."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {n: b.cpu() for n, b in program.updated_buffers()})
    return {name: value for part in found for name, value in part.items()}


def _compare_buffers(
    verdict: Verdict, reference: nn.Module, buffers: dict[str, torch.Tensor]
) -> None:
    """After one step; a buffer that differs makes the case unequal, under its own name."""
    wanted = dict(reference.named_buffers())
    for name, value in buffers.items():
        expected = wanted[name].double()
        error = float((value.double() - expected).norm() / expected.norm().clamp_min(1e-12))
        if not error <= verdict.tolerance:
            verdict.equal = False
            verdict.error = f"buffer {name!r} differs by {error:.2g}"


def describe(plan: Plan) -> str:
    schedule = plan.schedule if plan.chunks == 1 else f"{plan.schedule} x {plan.chunks}"
    return (
        f"{plan.mesh}, {plan.microbatches} x {plan.microbatch}, {schedule}, ZeRO-{plan.zero}, "
        f"recompute {plan.recompute_label}, boundary {plan.boundary}"
    )


def _compare(
    verdict: Verdict,
    reference: nn.Module,
    batch: dict[str, torch.Tensor],
    loss: float,
    gradients: dict[str, torch.Tensor],
    loss_fn: LossFunction | None,
) -> None:
    expected = loss_of(reference, batch, loss_fn)
    torch.autograd.backward(expected)
    verdict.loss, verdict.reference_loss = loss, float(expected.detach())
    difference = abs(loss - verdict.reference_loss)
    verdict.loss_error = difference / max(abs(verdict.reference_loss), 1e-12)
    wanted = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    total = torch.sqrt(
        sum((g.double().norm() ** 2 for g in wanted.values()), torch.zeros(()).double())
    )
    for name, grad in wanted.items():
        got = gradients.get(name)
        if got is None:
            verdict.gradients[name] = float("inf")
            continue
        difference = (got.cpu().double() - grad.double()).norm()
        scale = max(float(grad.double().norm()), NEGLIGIBLE * float(total), 1e-30)
        verdict.gradients[name] = float(difference) / scale
    for name in set(gradients) - set(wanted):
        verdict.gradients[name] = float("inf") if float(gradients[name].abs().max()) else 0.0
    verdict.worst = max(verdict.gradients, key=lambda n: verdict.gradients[n], default="")
    verdict.worst_error = verdict.gradients.get(verdict.worst, 0.0)
    dtype = next(iter(reference.parameters())).dtype
    verdict.tolerance = TOLERANCE.get(dtype, 1e-5)
    # Not `<=` reversed: a NaN must not pass.
    verdict.equal = (
        verdict.loss_error <= verdict.tolerance and verdict.worst_error <= verdict.tolerance
    )


def _train(
    verdict: Verdict | None,
    program: Any,
    reference: nn.Module | None,
    batch: dict[str, Any],
    steps: int,
    loss_fn: LossFunction | None,
) -> None:
    """AdamW on both, or Adafactor where the plan counts with it; the same batch each step (the
    first step's gradients are there already).

    `eps` is above the rounding of gradients: AdamW would blow up the noise of a gradient that is
    exactly zero in theory (that of a key bias) to steps of full length.
    """
    optimizer, twin = _optimizers(program, reference)
    for _ in range(steps):
        optimizer.step()
        optimizer.zero_grad()
        loss = float(program.step(batch))
        if verdict is not None and reference is not None and twin is not None:
            twin.step()
            twin.zero_grad()
            expected = loss_of(reference, batch, loss_fn)
            torch.autograd.backward(expected)
            verdict.step_losses.append(loss)
            verdict.reference_step_losses.append(float(expected.detach()))
    state = program.full_state_dict()
    if verdict is None or reference is None:
        return
    errors = [
        float((state[n].cpu().double() - p).norm() / p.norm().clamp_min(1e-12))
        for n, p in ((n, p.detach().double()) for n, p in reference.named_parameters())
        if n in state
    ]
    verdict.parameter_error = max(errors, default=0.0)
    pairs = zip(verdict.step_losses, verdict.reference_step_losses, strict=True)
    together = all(abs(a - b) <= 1e-4 * max(abs(b), 1e-6) for a, b in pairs)
    verdict.equal = verdict.equal and together


def _optimizers(
    program: Any, reference: nn.Module | None
) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer | None]:
    """One for the program, and torch's own for one device."""
    if program.plan.optimizer == "adafactor":
        options: dict[str, Any] = {"lr": 1e-3, "eps": (1e-6, 1e-3)}
        one_device: Any = torch.optim.Adafactor
        optimizer = program.make_optimizer(**options)
    else:
        options, one_device = {"lr": 1e-3, "eps": 1e-6}, torch.optim.AdamW
        on_host = program.plan.optimizer == "adamw-host"
        optimizer = (
            program.make_optimizer(**options)
            if on_host
            else one_device(program.parameters(), **options)
        )
    return optimizer, one_device(reference.parameters(), **options) if reference else None


def verify_plans(
    model_text: str, cases: list[Case], prepared_program: Program | None = None
) -> list[Verdict] | None:
    """Cases with plans for one model, in one process group: the model is captured once, or not at
    all when a `prepared_program` of the plans' precision is given.

    An error of one case is its verdict.
    """
    import torch.distributed as dist

    from autopar.api import build, prepared

    captured: dict[str, Any] = {}
    verdicts = []
    for case in cases:
        assert case.plan is not None
        plan = Plan.from_dict(case.plan)
        try:
            model, source = build_real(model_text, case.sequence, case.seed)
            reference = copy.deepcopy(model)

            def program_for(
                model: nn.Module = model, source: ModelSource = source, plan: Plan = plan
            ) -> Any:
                if plan.precision not in captured:
                    captured[plan.precision] = prepared(
                        model, source.example_inputs, plan, loss_fn=source.loss_fn
                    )
                return captured[plan.precision]

            ready = program_for if prepared_program is None else lambda: prepared_program
            program = build(model, plan, case.global_batch, ready, timeout_seconds=120.0)
            found = compare_with_one_device(case, program, model, reference, source)
        except Exception as error:
            found = Verdict(case, error=f"{type(error).__name__}: {error}")
        if found is not None:
            verdicts.append(found)
    return verdicts if dist.get_rank() == 0 else None
