"""Choices of experts to slots of their copies."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode

from autopar.runtime import slots_in_turn  # noqa: F401 - registers the op

# Expert 0 is in slots 4 and 1, 1 in slot 0, 2 in slots 2, 5 and 3.
SLOTS = torch.tensor([[4, 1, 4], [0, 0, 0], [2, 5, 3]])
COPIES = torch.tensor([2, 1, 3])


def slots(index: torch.Tensor, first: int = 0) -> torch.Tensor:
    found: torch.Tensor = torch.ops.autopar.slots_in_turn(index, SLOTS, COPIES, first)
    return found


def test_copies_take_turns_in_the_order_of_tokens() -> None:
    index = torch.tensor([[0, 1], [2, 0], [0, 2], [2, 1], [2, 0]])
    assert slots(index).tolist() == [[4, 0], [2, 1], [4, 5], [3, 0], [2, 1]]
    assert slots(index, 1).tolist() == [[1, 0], [5, 4], [1, 3], [2, 0], [5, 4]]


@pytest.mark.parametrize("first", [0, 1, 5])
def test_copies_get_equal_parts(first: int) -> None:
    """Also where choices go with the position, which turns by position alone would not divide."""
    index = torch.tensor([0, 2] * 30).view(-1, 1)
    counts = torch.bincount(slots(index, first).view(-1), minlength=6)
    assert counts.tolist() == [0, 15, 10, 10, 15, 10]


def test_without_values() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = slots(torch.zeros(5, 2, dtype=torch.int64))
    assert found.shape == (5, 2) and found.dtype == torch.int64
