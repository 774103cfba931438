"""The optimizer of a plan: which class, with what options, and what is missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from autopar.errors import UsageError
from autopar.plan_document import OPTIMIZERS
from autopar.runtime.adafactor import Adafactor
from autopar.runtime.host_optimizer import HostAdamW
from autopar.runtime.planned_optimizer import planned_optimizer


def program(name: str) -> Any:
    model = nn.Linear(3, 2)
    return SimpleNamespace(
        plan=SimpleNamespace(optimizer=name),
        parameters=model.parameters,
        named_parameters=model.named_parameters,
    )


@pytest.mark.parametrize(
    ("name", "kind", "states"),
    [
        ("adamw", torch.optim.AdamW, {"exp_avg", "exp_avg_sq"}),
        ("adamw-host", HostAdamW, {"exp_avg", "exp_avg_sq"}),
        ("sgd", torch.optim.SGD, set()),
        ("sgd-momentum", torch.optim.SGD, {"momentum_buffer"}),
        ("adafactor", Adafactor, {"row_var", "col_var", "variance"}),
    ],
)
def test_it_has_the_states_that_are_planned(name: str, kind: type, states: set[str]) -> None:
    made = program(name)
    optimizer = planned_optimizer(made, lr=0.5)
    assert type(optimizer) is kind and optimizer.param_groups[0]["lr"] == 0.5
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert {key for state in optimizer.state.values() for key in state} - {"step"} == states


def test_momentum_can_be_given() -> None:
    optimizer = planned_optimizer(program("sgd-momentum"), lr=0.1, momentum=0.5)
    assert optimizer.param_groups[0]["momentum"] == 0.5


def test_eight_bit_states_name_the_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(UsageError, match="torchao is not installed") as error:
        planned_optimizer(program("adamw-8bit"))
    assert "autopar[eight-bit]" in str(error.value)


def test_eight_bit_states_where_the_library_is() -> None:
    torchao = pytest.importorskip("torchao.optim")
    assert type(planned_optimizer(program("adamw-8bit"))) is torchao.AdamW8bit


def test_every_optimizer_of_a_plan_is_known() -> None:
    assert set(OPTIMIZERS) == {
        "adamw",
        "adamw-host",
        "adamw-8bit",
        "adafactor",
        "sgd",
        "sgd-momentum",
    }
