"""Which rows are above the capacity of their expert, and models whose experts are limited."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from autopar.errors import UsageError
from autopar.experts.capacity import capacity, capacity_factor, limit_experts
from autopar.passes.capture import capture
from autopar.runtime import collectives  # noqa: F401 - registers the ops
from tests.passes.expert_toys import library

Choices = list[tuple[int, float]]


def reference(index: torch.Tensor, weights: torch.Tensor, experts: int, most: int) -> torch.Tensor:
    """Row by row: an expert keeps its largest, of equal ones the first."""
    kept = index.clone().reshape(-1)
    flat = weights.reshape(-1).tolist()
    for expert in range(experts):
        rows = [i for i, e in enumerate(index.reshape(-1).tolist()) if e == expert]
        for row in sorted(rows, key=lambda i: (-flat[i], i))[most:]:
            kept[row] = experts
    return kept.view_as(index)


@given(
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 6),
    st.floats(0.1, 3.0),
    st.integers(0, 2**31),
)
@settings(deadline=None, max_examples=80)
def test_the_largest_weights_stay(
    tokens: int, choices: int, experts: int, factor: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(0, experts, (tokens, choices), generator=generator)
    # A few values: ties are common.
    weights = torch.randint(0, 4, (tokens, choices), generator=generator) / 4
    most = capacity(factor, tokens, choices, experts)
    found = torch.ops.autopar.within_capacity(index, weights, experts, factor)
    assert torch.equal(found, reference(index, weights, experts, most))
    assert all(n <= most for e, n in Counter(found.reshape(-1).tolist()).items() if e < experts)


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 3), (1.25, 4), (0.1, 1), (2.0, 6)])
def test_rows_of_an_expert(factor: float, expected: int) -> None:
    assert capacity(factor, 6, 2, 4) == expected


def test_dropped_rows_add_nothing() -> None:
    """Of the op itself: hidden and weights of a dropped row have no gradient."""
    torch.manual_seed(0)
    hidden = torch.randn(4, 8, requires_grad=True)
    weights = torch.rand(4, 1, requires_grad=True)
    up = torch.randn(2, 6, 8, requires_grad=True)
    down = torch.randn(2, 8, 6, requires_grad=True)
    chosen = torch.zeros(4, 1, dtype=torch.int64)
    index = torch.ops.autopar.within_capacity(chosen, weights, 2, 1.0)
    kept = (index == 0).reshape(-1)
    assert int(kept.sum()) == 2
    arguments = (up, down, None, None, None, None, 3, 0, 1, False, "v0 = tanh.default(x); v0")
    result = torch.ops.autopar.experts(hidden, index, weights, *arguments)
    torch.autograd.backward(result.sum())
    whole = torch.tanh(hidden @ up[0].T) @ down[0].T * weights
    torch.testing.assert_close(result, torch.where(kept[:, None], whole, 0))
    assert hidden.grad is not None and weights.grad is not None
    assert not hidden.grad[~kept].any() and not weights.grad[~kept].any()
    assert hidden.grad[kept].any()


def test_a_model_is_captured_with_its_limit() -> None:
    model, inputs = library("mixtral")
    assert limit_experts(model, 1.5) is model
    names = [n for n, m in model.named_modules() if capacity_factor(m) == 1.5]
    assert names == ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]
    program = capture(model, inputs)
    calls = {n.name: n for n in program.graph.nodes if "autopar" in str(n.target)}
    limits = [n for n in calls.values() if "within_capacity" in str(n.target)]
    experts = [n for n in calls.values() if "autopar.experts" in str(n.target)]
    assert len(limits) == len(experts) == 2
    assert [n.args[2:] for n in limits] == [(4, 1.5)] * 2
    assert [n.args[9] for n in experts] == [5, 5] and experts[0].args[1] is limits[0]


@pytest.mark.parametrize("factor", [0, -1.0, float("nan"), float("inf"), "1", True, None])
def test_a_factor_that_is_none(factor: object) -> None:
    with pytest.raises(UsageError, match="a capacity factor of"):
        limit_experts(library("mixtral")[0], factor)  # type: ignore[arg-type]


def test_a_model_without_experts() -> None:
    with pytest.raises(UsageError, match="Linear has no experts whose rows could be limited"):
        limit_experts(nn.Linear(2, 2), 1.0)
