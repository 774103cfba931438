"""Cuts of a chain into even parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.workflow.configuration import cut_by_parameters, cut_evenly, part_sizes


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


@pytest.mark.parametrize(
    ("layers", "head", "parts", "expected"),
    [
        # nanotron's 1.34B: layers of 67.1M, a head of 268M; a share is 10 layers, not passed by 10.
        (16, 4, 2, [11, 5]),
        (8, 0, 2, [5, 3]),
        # 2, 1, 1, 0 would leave the last part empty: as many each, then.
        (4, 0, 4, [1, 1, 1, 1]),
    ],
)
def test_a_part_ends_with_the_layer_that_passes_its_share(layers, head, parts, expected):
    names = ["embed", *map(str, range(layers)), "head"]
    weights = [10, *[1] * layers, head]
    found = cut_by_parameters(names, weights, (1, 1), parts, recompute=False)
    sizes = [len(p.blocks) for p in found]
    sizes[0], sizes[-1] = sizes[0] - 1, sizes[-1] - 1
    assert sizes == expected
    assert [n for p in found for n in p.blocks] == names
