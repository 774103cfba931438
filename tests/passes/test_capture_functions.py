"""A function of the user with its own backward is an op: value, gradient and rule are its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopar.errors import CaptureError
from autopar.op_call import Bindings, op_call
from autopar.passes.capture import capture
from autopar.program import Program
from autopar.rules import rule_for
from autopar.rules.strategy import strategies

Tensor = torch.Tensor


class Rounded(torch.autograd.Function):
    """Straight through: the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Reversed(torch.autograd.Function):
    """The input itself, and its gradient times a fixed number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return -ctx.factor * grad, None


class Centred(torch.autograd.Function):
    """Two results, of which rows are not pointwise; an operand that is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        return (x - x.mean(-1, keepdim=True)) * weight, x * 2

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return a * weight + 3 * b, (a * x).sum(0)


class Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


class Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, int]:
        return x * 2, 3

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> Tensor:  # type: ignore[override]
        return grad


class Model(nn.Module):
    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.step = step
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.step(self.first(x), self.weight)).square().mean()
        return result


def both(x: Tensor, weight: Tensor) -> Tensor:
    a, b = Centred.apply(x, weight)
    return a + b


STEPS: dict[str, Callable[..., Any]] = {
    "rounded": lambda x, w: Rounded.apply(x) * w,
    "reversed": lambda x, w: Reversed.apply(x, 0.5) + Reversed.apply(w, 2.0),
    "centred": both,
}


def captured(step: Callable[..., Any]) -> tuple[Model, Program]:
    torch.manual_seed(0)
    model = Model(step)
    return model, capture(model, {"x": torch.randn(4, 8)})


@pytest.mark.parametrize("name", STEPS)
def test_the_graph_computes_what_the_model_does(name: str) -> None:
    model, program = captured(STEPS[name])
    state = dict(model.named_parameters())
    own = {n: p.detach().clone().requires_grad_() for n, p in state.items()}
    x = torch.randn(6, 8)
    given = [x if i.kind == "input" else own[i.target] for i in program.inputs]
    outputs = program.graph_module(*given)
    (outputs[0] if isinstance(outputs, tuple | list) else outputs).backward()
    model(x).backward()
    for key, parameter in state.items():
        torch.testing.assert_close(own[key].grad, parameter.grad)


def functions(program: Program) -> list[torch.fx.Node]:
    return [n for n in program.graph.nodes if "autopar_functions" in str(n.target)]


def test_pointwise_ones_are_split_and_others_are_whole() -> None:
    for name, free in (("rounded", {"x0", "x1"}), ("reversed", {"x0", "x1"}), ("centred", set())):
        program = captured(STEPS[name])[1]
        node = functions(program)[0]
        call = op_call(node, Bindings(program.symbols, program.sizes))
        found = {s.name for s in strategies(call, rule_for(call), 2)}
        assert {f"shard {f}" for f in free} <= found, (name, found)
        assert bool(free) or not [s for s in found if s.startswith("shard")]


def test_one_op_for_each_function_and_fixed_value() -> None:
    first, again = (functions(captured(STEPS["reversed"])[1]) for _ in range(2))
    assert len({n.target for n in first}) == 2
    assert [n.target for n in first] == [n.target for n in again]


def test_no_gradient_no_op() -> None:
    def aside(x: Tensor, weight: Tensor) -> Tensor:
        with torch.no_grad():
            noise = Rounded.apply(x)
        return x * noise

    assert not functions(captured(aside)[1])


KEPT = Rounded.apply


@pytest.mark.parametrize(
    ("step", "message", "remedy"),
    [
        (lambda x, w: KEPT(x), "a name that holds its apply", "NAME.apply"),
        (lambda x, w: Changed.apply(x * 1), "changes its inputs in place", "new tensors"),
        (lambda x, w: Counted.apply(x)[0], "returns something that is no tensor", "custom_op"),
        (lambda x, w: Reversed.apply(x, [1.0]), "is given a list", "fixed numbers"),
    ],
)
def test_what_can_be_no_op_is_refused(step: Callable[..., Any], message: str, remedy: str) -> None:
    before = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(CaptureError) as info:
        captured(step)
    assert message in info.value.message and remedy in info.value.next_step
    assert torch.autograd.Function.__dict__["apply"] is before


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        again: Tensor = checkpoint(self.second, hidden, use_reentrant=True)
        return (hidden + again).square().sum()


def test_a_reentrant_checkpoint_keeps_its_gradients() -> None:
    model, x = Recomputed(), torch.randn(4, 4)
    program = capture(model, {"x": x})
    values = {**dict(model.named_parameters()), "x": x}
    (loss,) = program.graph_module(*(values[i.target] for i in program.inputs))
    model(x).backward()
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(loss, parameters), tuple(p.grad for p in parameters)
    )
