"""The meta twin: a function from tensors to the loss that leaves the model as it was."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autopar.errors import CaptureError
from autopar.passes.capture_twin import meta_twin, named_inputs, returns_loss, without_caches


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + sum(rest)


def test_positional_inputs_get_the_names_of_forward() -> None:
    a, b, c = torch.ones(2, 4), torch.ones(2, 4), torch.ones(2, 4)
    assert named_inputs(Pair(), (a, b, c)) == {"x": a, "rest": (b, c)}
    assert named_inputs(Pair(), {"x": a}) == {"x": a}
    with pytest.raises(CaptureError, match="don't fit Pair.forward"):
        named_inputs(Pair(), ())


def test_the_twin_takes_tensors_and_returns_the_loss() -> None:
    model = Pair()
    twin = meta_twin(model, torch.float64)
    inputs = {"x": torch.ones(2, 4), "rest": (torch.ones(2, 4, dtype=torch.float64),)}
    leaves = returns_loss(twin, inputs, lambda out: out.mean())
    assert [t.device.type for t in leaves] == ["meta", "meta"]
    leaves[0] = leaves[0].to(torch.float64)
    loss = twin(*leaves)
    assert loss.is_meta and loss.dim() == 0 and loss.dtype is torch.float64
    assert "forward" not in vars(model) and model.inner.weight.device.type == "cpu"


def test_caches_are_off_everywhere_in_the_twin() -> None:
    model = Pair()
    model.inner.config = SimpleNamespace(use_cache=True)
    without_caches(model)
    assert not model.inner.config.use_cache


def test_what_can_not_be_copied_is_refused() -> None:
    model = Pair()
    model.lock = __import__("threading").Lock()
    with pytest.raises(CaptureError, match="can't be copied"):
        meta_twin(model, None)


def test_a_lazy_module_that_has_no_shape_yet() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))
    with pytest.raises(
        CaptureError, match=r"parameter '0\.weight' of Sequential has no shape"
    ) as e:
        meta_twin(model, None)
    assert "call the model once" in e.value.next_step
