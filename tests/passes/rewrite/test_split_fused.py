"""Fused products become one product for each part; anything but a clean cut is left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.marks import replicate
from autopar.parts import Parts
from autopar.passes.capture import capture
from autopar.passes.rewrite.simplify import Simplify
from autopar.passes.rewrite.split_fused import SplitFused
from autopar.piece_name import parse_piece
from autopar.program import Program

Cut = Callable[[Tensor], Tensor]


class Fused(nn.Module):
    def __init__(self, cut: Cut, bias: bool = True, transposed: bool = False) -> None:
        super().__init__()
        self.cut, self.transposed = cut, transposed
        shape = (8, 24) if transposed else (24, 8)
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(24)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.transposed:
            assert self.bias is not None
            rows = torch.addmm(self.bias, x.view(-1, 8), self.weight)
            return self.cut(rows.view(x.shape[0], x.shape[1], 24)).square().sum()
        return self.cut(nn.functional.linear(x, self.weight, self.bias)).square().sum()


def split(h: Tensor) -> Tensor:
    q, k, v = h.split(8, -1)
    return q * k.sin() + v.cos()


def uneven(h: Tensor) -> Tensor:
    q, k, v = h.split([16, 4, 4], 2)
    return q * torch.cat([k, v, k, v], -1)


def slices(h: Tensor) -> Tensor:
    q, k, v = h[..., :8], h[..., 8:16], h[..., 16:]
    return q * k.sin() + v * q


def chunk(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return nn.functional.silu(gate) * up


CLEAN: dict[str, tuple[Cut, int]] = {
    "split": (split, 3),
    "uneven": (uneven, 3),
    "slices": (slices, 3),
    "chunk": (chunk, 2),
}


def rewritten(model: nn.Module) -> tuple[Program, Program]:
    program = capture(model, {"x": torch.randn(2, 3, 8, dtype=model.get_parameter("weight").dtype)})
    before = Simplify().run(Parts(program, sizes=program.sizes))
    return before.program, SplitFused().run(before).program


def run(program: Program, model: nn.Module, x: Tensor) -> Tensor:
    """The program's loss, with parameters and their pieces from the model."""
    values = []
    for item in program.inputs:
        piece = parse_piece(item.target)
        name = piece.whole if piece else item.target
        value = x if item.kind == "input" else model.get_parameter(name)
        if piece:
            value = value.narrow(piece.dim, piece.start, piece.stop - piece.start)
        values.append(value)
    placeholders = [n.name for n in program.graph.find_nodes(op="placeholder")]
    assert placeholders == [i.name for i in program.inputs]
    loss: Tensor = fx.Interpreter(program.graph_module).run(*values)[0]
    return loss


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", CLEAN)
def test_parts_get_their_own_product(name: str, bias: bool, transposed: bool) -> None:
    cut, parts = CLEAN[name]
    model = Fused(cut, bias or transposed, transposed).double()
    _, after = rewritten(model)
    after.graph.lint()
    products = [n for n in after.graph.nodes if n.name.startswith(("linear", "addmm"))]
    assert len(products) == parts
    weights = [i.target for i in after.inputs if i.target.startswith("weight[")]
    assert len(weights) == parts
    assert weights[0].startswith("weight[:, 0:" if transposed else "weight[0:")
    for node in after.graph.nodes:
        if node.op == "call_function":
            assert "split" not in node.name and "slice" not in node.name

    x = torch.randn(4, 3, 8, dtype=torch.float64)
    expected = model(x)
    expected.backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    loss = run(after, model, x)
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[key])


@pytest.mark.parametrize(
    "cut",
    [
        lambda h: h[..., :8] * h[..., 8:16],  # a part that nobody reads
        lambda h: h[..., :16].sin().sum() + h[..., 8:].sum(),  # parts that overlap
        lambda h: split(h).sum() + h.sum(),  # the whole is read too
        lambda h: h.split(1, 1)[0],  # cut along another dim
        lambda h: h[..., ::2] * h[..., 1::2],
    ],
)
def test_anything_else_stays(cut: Cut) -> None:
    before, after = rewritten(Fused(cut))
    assert after.graph_module.code == before.graph_module.code
    assert after.inputs == before.inputs


def test_a_module_marked_from_outside_stays() -> None:
    before, after = rewritten(replicate(Fused(split)))
    assert after.graph_module.code == before.graph_module.code
    assert after.inputs == before.inputs


def test_tied_weights_stay() -> None:
    class Tied(Fused):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.weight.sum()

    before, after = rewritten(Tied(split))
    assert after.inputs == before.inputs
