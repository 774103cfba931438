"""Numbers of a graph that are made of a fixed batch, and what can't be told apart from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.errors import UsageError
from autopar.passes.analysis.loss_form import loss_form
from autopar.passes.capture import capture
from autopar.passes.compare_batches import resized
from autopar.program import Program
from autopar.workflow.prepare import prepare

WIDTH = 6
# (model, what the layer gave, the size of the batch as a plain number) -> the loss.
Body = Callable[[nn.Module, Tensor, int], Tensor]


class Fixed(nn.Module):
    """`int` of a size makes torch.export fix it."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(512, WIDTH))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.layer(x), int(x.shape[0]))


def captured(body: Body, rows: int = 4) -> Program:
    program = capture(Fixed(body), {"x": torch.randn(rows, WIDTH)})
    return prepare(program, program.sizes)


APART: dict[str, tuple[str, Body]] = {
    "mean": ("mean", lambda m, h, b: h.square().mean()),
    "sum": ("sum", lambda m, h, b: h.square().sum()),
    "sum over the batch": ("mean", lambda m, h, b: h.square().sum() / b),
    "views": ("mean", lambda m, h, b: h.view(b, 2, 3).mT.reshape(b * 2, -1).square().mean()),
    "a row for all": ("mean", lambda m, h, b: (h + m.table[:1].expand(b, WIDTH)).square().mean()),
    "repeated": ("mean", lambda m, h, b: (h + m.table[:1].repeat(b, 1)).square().mean()),
    "all of them": ("mean", lambda m, h, b: h[:b].square().mean()),
    "zeros": ("mean", lambda m, h, b: (h + torch.zeros(b, 1, device=h.device)).square().mean()),
    "a branch at one": ("mean", lambda m, h, b: (h * 2 if b > 1 else h).square().mean()),
}


@pytest.mark.parametrize("rows", [1, 2, 4, 6])
@pytest.mark.parametrize("name", APART)
def test_ordinary_models_get_a_symbol(name: str, rows: int) -> None:
    form, body = APART[name]
    program = captured(body, rows)
    assert program.batch_stays_whole == ""
    assert program.sizes["batch"] == rows and "batch" in program.symbols
    assert loss_form(program).kind == form


@pytest.mark.parametrize("name", APART)
def test_the_graph_is_the_model_at_other_batches(name: str) -> None:
    model = Fixed(APART[name][1])
    program = capture(model, {"x": torch.randn(4, WIDTH)})
    parameters = dict(model.named_parameters())
    on_cpu = program.graph_module
    for node in on_cpu.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
    on_cpu.recompile()
    for rows in (2, 3, 7):
        x = torch.randn(rows, WIDTH)
        values = [x if i.kind == "input" else parameters[i.target] for i in program.inputs]
        (loss,) = on_cpu(*values)
        torch.testing.assert_close(loss, model(x))


WHOLE: dict[str, Body] = {
    "rows of a table": lambda m, h, b: (h + m.table[:b]).square().mean(),
    "a row by the batch": lambda m, h, b: (h + m.table[b - 1]).square().mean(),
    "rows from the second": lambda m, h, b: (h + m.table[1 : b + 1]).square().mean(),
    "rows by place": lambda m, h, b: (
        (h + m.table[torch.arange(b, device=h.device)]).square().mean()
    ),
    "sum of rows": lambda m, h, b: (h + m.table[:b].sum(0)).square().mean(),
    "fixed view": lambda m, h, b: h.view(4, -1).softmax(-1).square().mean(),
    "place": lambda m, h, b: (h * torch.arange(b, device=h.device)[:, None]).square().mean(),
    "number": lambda m, h, b: (h * b).square().mean(),
    "root of the number": lambda m, h, b: (h * b**-0.5).square().mean(),
    "a bound": lambda m, h, b: (h * min(b, 5)).square().mean(),
    "a bound that is far": lambda m, h, b: (h * min(b, 40)).square().mean(),
    "a branch": lambda m, h, b: (h * (2.0 if b > 4 else 1.0)).square().mean(),
    "a branch below": lambda m, h, b: (h * (2.0 if b > 3 else 1.0)).square().mean(),
    "half": lambda m, h, b: h[: b // 2].square().mean(),
    "order": lambda m, h, b: (h[list(range(b))[::-1]] * h.detach()).square().mean(),
    "a loop": lambda m, h, b: torch.stack([h[i] * (i + 1) for i in range(b)]).mean(),
    "roll by the batch": lambda m, h, b: (h.roll(b, 1) * h.detach()).square().mean(),
    "targets by place": lambda m, h, b: F.cross_entropy(h, torch.arange(b, device=h.device) % 6),
    "a ramp": lambda m, h, b: (h * torch.linspace(0, 1, b, device=h.device)[:, None]).mean(),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_depends_on_the_batch_keeps_it_whole(name: str) -> None:
    assert captured(WHOLE[name]).batch_stays_whole


def test_the_reason_names_the_line() -> None:
    reason = captured(WHOLE["a branch"]).batch_stays_whole
    assert "torch.export fixes the batch, and mul differs between batches of 4 and 5" in reason
    assert "test_compare_batches.py" in reason
    assert "a batch of 5 can't be captured" in captured(WHOLE["fixed view"]).batch_stays_whole


def test_another_global_batch_than_that_of_a_whole_one_is_refused_with_the_reason() -> None:
    model = Fixed(WHOLE["a branch"])
    with pytest.raises(UsageError, match="captured for a batch of 4: torch.export fixes") as info:
        autopar.plan(
            model, "cpu:1", example_inputs={"x": torch.ones(4, WIDTH)}, global_batch_size=8
        )
    assert "give example_inputs of 8 rows" in info.value.next_step


def test_inputs_that_are_batched_by_chance_are_named() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return (self.layer(x) @ mask).square().mean()

    reason = capture(
        Masked(), {"x": torch.ones(4, WIDTH), "mask": torch.ones(4, 4)}
    ).batch_stays_whole
    assert "taken as batched, by dim 0 of 4: x, mask" in reason
    other = capture(Masked(), {"x": torch.ones(3, WIDTH), "mask": torch.ones(4, 4)})
    assert other.batch_stays_whole == "" and other.input("mask").batch_dim == -1


def test_what_is_no_batch_is_not_resized() -> None:
    inputs = {"x": torch.ones(4, 2), "table": [torch.ones(3, 4)], "n": torch.ones(()), "k": 7}
    found = resized(inputs, 4, 9)
    assert found["x"].shape == (9, 2) and found["x"].is_meta
    assert found["table"][0].shape == (3, 4) and found["n"].shape == () and found["k"] == 7
