"""Experts in 16 bits on real gloo ranks, shared experts beside their exchange, against one device
that computes in the same dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from autopar.workflow.verification import TOLERANCE
from tests.end_to_end import expert_models
from tests.warm_ranks import run_on_ranks

LAYOUTS = ("pp=1,tp=1,dp=4,ep=2,zero=1", "pp=1,tp=1,dp=4,ep=4,zero=0", "pp=1,tp=1,dp=4,ep=4,zero=3")
ROWS = 8
Found = tuple[float, dict[str, torch.Tensor]]


def toy(model: str, precision: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    made, example = getattr(expert_models, model)()
    return (made.to(torch.bfloat16) if precision == "bf16" else made).train(), example


def batch(model: Any, example: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    return {
        name: torch.randint(0, vocabulary, (ROWS, value.shape[1]), generator=generator)
        for name, value in example.items()
    }


def steps(model: str, precision: str) -> dict[str, Found]:
    import autopar

    found = {}
    for pins in LAYOUTS:
        module, example = toy(model, precision)
        program = autopar.compile(
            module,
            example_inputs=example,
            global_batch_size=ROWS,
            pins=pins,
            precision=precision,
            timeout_seconds=120.0,
        )
        loss = program.step(batch(module, example))
        found[pins] = float(loss), program.full_gradients()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize("model", ["qwen2_moe", "deepseek_v3"])
def test_loss_and_gradients_in_16_bits(model: str, precision: str) -> None:
    found = run_on_ranks(steps, 4, (model, precision), timeout_seconds=300)[0]
    module, example = toy(model, precision)
    # Compute in bfloat16, from weights that are rounded once.
    reference: Any = copy.deepcopy(module).to(torch.bfloat16)
    expected = reference(**batch(module, example)).loss
    expected.backward()
    wanted = {n: p.grad.double() for n, p in reference.named_parameters() if p.grad is not None}
    total = float(torch.stack([g.norm() for g in wanted.values()]).norm())
    most = TOLERANCE[torch.bfloat16]
    for pins, (loss, gradients) in found.items():
        assert loss == pytest.approx(float(expected.detach()), rel=1e-3), pins
        for name, whole in wanted.items():
            dtype = torch.bfloat16 if precision == "bf16" else torch.float32
            assert gradients[name].dtype == dtype
            scale = max(float(whole.norm()), 1e-3 * total)
            error = float((gradients[name].double() - whole).norm()) / scale
            assert error < most, (pins, name, error)
