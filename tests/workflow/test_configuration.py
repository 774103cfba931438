"""Cuts of a chain into even parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.workflow.configuration import cut_evenly, part_sizes


@pytest.mark.parametrize(
    ("layers", "parts", "expected"),
    [
        (72, 6, [12] * 6),
        (70, 12, [5, *[6] * 10, 5]),  # BLOOM: embedding and head count as layers
        (126, 4, [31, 32, 32, 31]),  # Llama 3 405B
        (126, 64, [1, *[2] * 62, 1]),
        (7, 3, [2, 3, 2]),
        (5, 1, [5]),
        (4, 4, [1] * 4),
    ],
)
def test_part_sizes(layers, parts, expected):
    assert part_sizes(layers, parts) == expected


@given(layers=st.integers(1, 200), parts=st.integers(1, 40))
def test_every_layer_is_in_one_part_and_none_is_empty(layers, parts):
    sizes = part_sizes(layers, parts)
    assert len(sizes) == parts and sum(sizes) == layers
    if layers >= parts:
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1


def test_ends_go_with_the_first_and_last_layer():
    names = ["embed", "a", "b", "c", "d", "norm", "head"]
    parts = cut_evenly(names, (1, 2), 2, recompute=True)
    assert [p.blocks for p in parts] == [("embed", "a", "b"), ("c", "d", "norm", "head")]
    assert [p.recompute for p in parts] == [("a", "b"), ("c", "d")]
    assert all(p.recompute == () for p in cut_evenly(names, (1, 2), 4, recompute=False))
