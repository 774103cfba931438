"""What a model may ask while it is traced without values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.passes.capture import capture
from autopar.passes.capture_tracing import Tracing

X = torch.ones(4, 4)


class Guarded(nn.Module):
    """Clamps after an overflow, as several vision models do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if not torch.isfinite(x).all():
            x = x.clamp(-1, 1)
        if torch.isinf(x).any() or torch.isnan(x).any():
            x = x.clamp(-2, 2)
        return x.sum()


def test_overflow_guards_are_left_out_with_a_note() -> None:
    program = capture(Guarded(), {"x": X})
    assert not [n for n in program.graph.nodes if "clamp" in str(n.target)]
    assert len(program.notes) == 2
    assert all("taken to be finite" in n and "test_capture_tracing.py" in n for n in program.notes)


def test_other_questions_about_values_are_still_questions() -> None:
    with Tracing() as tracing:
        assert bool((X > 0).all())
        assert not torch.isfinite(X / 0).all() or tracing.notes


def test_a_list_as_an_index_keeps_its_numbers() -> None:
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)[:, [3, -2]].sum()

    (value,) = capture(Indexed(), {"x": X}).constants.values()
    assert value.tolist() == [3, -2]


def test_nn_transformer_with_a_mask_is_captured() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
            return self.encoder(x, mask=mask).sum()

    before = nn.modules.transformer._detect_is_causal_mask
    program = capture(Model(), {"x": torch.ones(4, 3, 8)})
    attention = [n for n in program.graph.nodes if "scaled_dot_product" in str(n.target)]
    assert attention and isinstance(attention[0].args[3], torch.fx.Node)
    assert nn.modules.transformer._detect_is_causal_mask is before


def vmapped(z: torch.Tensor) -> torch.Tensor:
    return torch.vmap(torch.tanh)(z)


def derivative(z: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda q: q.pow(2).sum())(z)


def directional(z: torch.Tensor) -> torch.Tensor:
    return torch.func.jvp(torch.tanh, (z,), (torch.ones_like(z),))[1]  # type: ignore[no-any-return]


def inner_gradient(z: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(z.pow(2).sum(), z, create_graph=True)[0]


class Steps(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.steps = nn.ModuleDict({"one": nn.Linear(4, 4), "two": Step(function)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.steps["two"](self.steps["one"](x)).sum()  # type: ignore[no-any-return]


class Step(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


@pytest.mark.parametrize("function", [vmapped, derivative, directional, inner_gradient])
def test_functions_of_functions_are_refused_at_their_line(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(CaptureError) as info:
        capture(Steps(function), {"x": X})
    assert "module 'steps.two'" in info.value.message
    assert f"{__file__}:{function.__code__.co_firstlineno + 1}" in info.value.message
    assert "write" in info.value.next_step and ".item()" not in info.value.next_step


def test_data_is_the_value_without_gradient() -> None:
    program = capture(Steps(lambda z: z / z.data.amax()), {"x": X})
    amax = next(n for n in program.graph.nodes if "amax" in str(n.target))
    assert not amax.meta["requires_grad"]
