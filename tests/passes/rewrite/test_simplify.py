"""Simplify: what computes nothing goes, casts become plain, writes in place become values."""

from __future__ import annotations

import torch
from torch import nn

from autopar.parts import Parts
from autopar.passes.capture import capture
from autopar.passes.rewrite.simplify import Simplify
from autopar.program import Program

X = torch.ones(4, 6)


def after(model: nn.Module, x: torch.Tensor = X) -> Program:
    return Simplify().run(Parts(capture(model, {"x": x}))).program


def names(program: Program) -> list[str]:
    return [n.target._opname for n in program.graph.nodes if n.op == "call_function"]


def equal(model: nn.Module, program: Program, x: torch.Tensor = X) -> None:
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = [x if i.kind == "input" else state[i.target] for i in program.inputs]
    torch.testing.assert_close(program.graph_module(*values)[0], model(x))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.unused = nn.Linear(6, 6)
        self.register_buffer("table", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.inner(x)).sum()

    def body(self, y: torch.Tensor) -> torch.Tensor:
        return y


def test_idle_ops_and_unused_parameters_go() -> None:
    class Idle(Toy):
        def body(self, y: torch.Tensor) -> torch.Tensor:
            y = nn.functional.dropout(y, 0.0, True)
            y = nn.functional.dropout(y, 0.5, False)
            _ = y * 3
            return y.to(torch.float32)[:].type_as(self.inner.weight)

    model = Idle()
    program = after(model)
    assert names(program) == ["linear", "sum"]
    assert [i.target for i in program.inputs] == ["inner.weight", "inner.bias", "x"]
    equal(model, program)


def test_a_real_dropout_and_a_real_slice_stay() -> None:
    class Busy(Toy):
        def body(self, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(y[:, 1:], 0.5, True)

    assert {"dropout", "slice"} <= set(names(after(Busy())))


def test_every_cast_becomes_a_plain_one() -> None:
    class Cast(Toy):
        def body(self, y: torch.Tensor) -> torch.Tensor:
            return y.to(torch.float64).to("meta", torch.float16).float()

    program = after(Cast())
    casts = [n for n in program.graph.nodes if n.op == "call_function" and n.target._opname == "to"]
    assert casts and all(n.target is torch.ops.aten.to.dtype for n in casts)
    assert all(n.meta["requires_grad"] for n in casts)


def test_assertions_go() -> None:
    class Checked(Toy):
        def body(self, y: torch.Tensor) -> torch.Tensor:
            torch._check(y.shape[0] > 1)
            return y * 2

    assert not [n for n in names(after(Checked())) if n.startswith(("_assert", "sym_constrain"))]


def test_writes_in_place_become_values() -> None:
    class InPlace(Toy):
        def body(self, y: torch.Tensor) -> torch.Tensor:
            z = nn.functional.relu(y, inplace=True)
            z += 1
            z.div_(3)
            return z

    model = InPlace()
    program = after(model)
    assert names(program) == ["linear", "relu", "add", "div", "sum"]
    equal(model, program)


def test_a_write_that_another_name_sees_stays() -> None:
    class Mask(Toy):
        def body(self, y: torch.Tensor) -> torch.Tensor:
            mask = torch.zeros(6, 6, device=y.device)
            mask.diagonal().fill_(1.0)
            return y @ mask

    program = after(Mask())
    assert "fill_" in names(program)
    for node in program.graph.nodes:
        if isinstance(node.kwargs.get("device"), torch.device):
            node.update_kwarg("device", torch.device("cpu"))
    program.graph_module.recompile()


def test_a_repeated_run_changes_nothing() -> None:
    program = after(Toy())
    text = program.graph_module.code
    assert Simplify().run(Parts(program)).program.graph_module.code == text


def test_what_a_model_makes_on_the_cpu_is_made_where_all_else_is() -> None:
    class OwnTable(Toy):
        def body(self, y: torch.Tensor) -> torch.Tensor:
            table = 1.0 / torch.arange(1, 7, device="cpu").float()
            return y * table.to(y.device)

    program = after(OwnTable())
    devices = {n.kwargs["device"] for n in program.graph.nodes if "device" in n.kwargs}
    assert devices == {torch.device("meta")}
