"""What a rank runs in `test_training`: a training loop as a user writes it, beside one device's."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from tests.end_to_end.models import SEQUENCE, VOCABULARY, gpt2

STEPS = 3
Curve = tuple[list[float], list[float]]


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    names = ("input_ids", "labels")
    return {n: torch.randint(0, VOCABULARY, (8, SEQUENCE), generator=generator) for n in names}


def loop(parameters: list[nn.Parameter], step: Any) -> Curve:
    """Losses and gradient norms of SGD with momentum, a schedule, and clipping."""
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses, norms = [], []
    for _ in range(STEPS):
        losses.append(float(step()))
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return losses, norms


def on_a_device_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[str, Curve]:
    """Train with a `DeviceMesh` whose dims pin the degrees."""
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    torch.manual_seed(0)
    model, example = gpt2()
    program = autopar.compile(
        model,
        init_device_mesh("cpu", shape, mesh_dim_names=names),
        example_inputs=example,
        global_batch_size=8,
        timeout_seconds=60,
    )
    data = batch()
    return str(program.plan.mesh), loop(list(program.parameters()), lambda: program.step(data))


def adafactor_on_ranks(pins: str) -> tuple[list[float], list[str], list[float]]:
    """Losses with the plan's own optimizer, the names of its state, and losses of a second
    program that continues from the state of the first."""
    import autopar

    torch.manual_seed(0)
    model, example = gpt2()
    data, losses = batch(), []

    def build() -> Any:
        return autopar.compile(
            model,
            example_inputs=example,
            global_batch_size=8,
            pins=pins,
            optimizer="adafactor",
            timeout_seconds=60,
        )

    first, second = build(), build()
    optimizer, other = first.make_optimizer(lr=0.05), second.make_optimizer(lr=0.05)
    for step in range(2 * STEPS):
        if step == STEPS:
            state = first.optimizer_state_dict(optimizer)
            second.load_state_dict(first.state_dict())
            second.load_optimizer_state_dict(other, copy.deepcopy(state))
            first, optimizer = second, other
        losses.append(float(first.step(data)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, sorted(state), [float(first.step(data))]


def adafactor_on_one_device() -> list[float]:
    torch.manual_seed(0)
    model, _ = gpt2()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.05)
    data, losses = batch(), []
    for _ in range(2 * STEPS + 1):
        loss = model(**data).loss
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def one_device() -> Curve:
    torch.manual_seed(0)
    model, _ = gpt2()
    data = batch()

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(**data).loss
        torch.autograd.backward(loss)
        return loss.detach()

    return loop(list(model.parameters()), step)


def error_of(mesh: str | None, names: Iterable[str]) -> str:
    """The error that `compile` raises on this rank for a mesh that does not fit."""
    from torch.distributed.device_mesh import init_device_mesh

    import autopar
    from autopar.errors import AutoparError

    model, example = gpt2()
    given = mesh or init_device_mesh("cpu", (2,), mesh_dim_names=tuple(names))
    try:
        autopar.compile(
            model, given, example_inputs=example, global_batch_size=8, timeout_seconds=30
        )
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    return ""
