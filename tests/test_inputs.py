"""Nested inputs as named tensors, and back."""

from __future__ import annotations

from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from autopar.errors import UsageError
from autopar.inputs import flatten_inputs, replace_tensors

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Batch:
    ids: torch.Tensor
    parts: list[Any]


def tensor(value: float) -> torch.Tensor:
    return torch.tensor([value])


NEST = {
    "a": tensor(0),
    "b": Batch(tensor(1), [tensor(2), (tensor(3), 7)]),
    "c": Point(tensor(4), None),
    "d": UserDict({"deep": {"er": tensor(5)}}),
}


def test_names_are_the_way_to_a_tensor() -> None:
    tensors, fixed = flatten_inputs(NEST)
    names = ["a", "b_ids", "b_parts_0", "b_parts_1_0", "c_x", "d_deep_er"]
    assert list(tensors) == names
    assert [int(t) for t in tensors.values()] == list(range(6))
    assert fixed == {"b_parts_1_1": 7, "c_y": None}


def test_replaced_in_the_same_order_and_the_same_nest() -> None:
    seen: list[int] = []

    def double(value: torch.Tensor) -> torch.Tensor:
        seen.append(int(value))
        return value * 2

    made = replace_tensors(NEST, double)
    assert seen == list(range(6))
    assert isinstance(made["b"], Batch) and isinstance(made["c"], Point)
    assert int(made["b"].parts[1][0]) == 6 and made["b"].parts[1][1] == 7
    assert int(made["d"]["deep"]["er"]) == 10
    assert int(NEST["a"]) == 0


def test_names_are_valid_in_a_graph() -> None:
    given = {"input": tensor(0), "class": tensor(1), "a b": tensor(2)}
    assert list(flatten_inputs(given)[0]) == ["input_", "class_", "a_b"]


def test_two_values_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="'a_b'"):
        flatten_inputs({"a": {"b": tensor(0)}, "a_b": tensor(1)})
