"""Functions between the projections become text that computes the same at other widths."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.experts.activation import NoText, evaluate, is_columnwise, text_of

Function = Callable[[Tensor], Tensor]


def halves(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def clamped_pairs(x: Tensor) -> Tensor:
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(min=-7.0, max=7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def wide(x: Tensor) -> Tensor:
    return functional.gelu(x.float(), approximate="tanh").to(x.dtype)


def joined(x: Tensor) -> Tensor:
    gate, up = x.split([x.shape[-1] // 2] * 2, dim=-1)
    return torch.cat([gate[:, :0], gate.relu() * up], -1)


KNOWN: dict[str, tuple[Function, int, tuple[bool, bool]]] = {
    # The function, its width in inner sizes, and whether two parts, or one, may be sharded.
    "halves": (halves, 2, (True, False)),
    "clamped pairs": (clamped_pairs, 2, (False, True)),
    "another dtype inside": (wide, 1, (False, True)),
    "joined": (joined, 2, (True, False)),
    "softmax": (lambda x: x.softmax(-1), 1, (False, False)),
}


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_text_computes_what_the_function_does(name: str, dtype: torch.dtype) -> None:
    function, width, _ = KNOWN[name]
    text = text_of(function, dtype, width)
    x = torch.randn(9, 20, dtype=torch.float64).to(dtype).requires_grad_()
    expected, got = function(x), evaluate(text, [x])
    torch.testing.assert_close(got, expected)
    seed = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, x, seed)
    torch.testing.assert_close(torch.autograd.grad(got, x, seed), wanted)
    if width == 2:
        torch.testing.assert_close(evaluate(text, list(x.chunk(2, -1))), expected)


@pytest.mark.parametrize("name", KNOWN)
def test_which_columns_may_be_sharded(name: str) -> None:
    function, width, (two, one) = KNOWN[name]
    text = text_of(function, torch.float32, width)
    assert is_columnwise(text, 1) is one
    if width == 2:
        assert is_columnwise(text, 2) is two


def test_equal_functions_have_equal_text() -> None:
    again: Function = lambda x: nn.SiLU()(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]  # noqa: E731
    assert text_of(again, torch.float32, 2).count("silu") == 1
    assert text_of(halves, torch.float32, 2) == text_of(halves, torch.bfloat16, 2)


REFUSED: dict[str, tuple[Function, str]] = {
    "parameters": (nn.PReLU(), "reads or calls"),
    "random numbers": (lambda x: functional.dropout(x, 0.5), "random"),
    "other rows": (lambda x: x - x.mean(0), "depend on each other"),
    "another width": (lambda x: x[:, :6], "columns into the shape"),
    "the number of rows": (lambda x: x.reshape(-1, 8).relu().reshape(x.shape), "no simple way"),
    "sizes as numbers": (lambda x: x * float(x.shape[1]), "follows from the sizes"),
    "what fails": (lambda x: x @ torch.ones(3, 3), "RuntimeError"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_text_can_not_hold_is_refused(name: str) -> None:
    function, why = REFUSED[name]
    with pytest.raises(NoText, match=why):
        text_of(function, torch.float32, 1)
