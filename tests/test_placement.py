"""Placements: text form, local shapes, and what they say of value and gradient."""

from __future__ import annotations

import pytest

from autopar.errors import PlanError, UsageError
from autopar.placement import (
    Partial,
    Placement,
    Replicate,
    ReplicatePartialGrad,
    Shard,
    boundary_of,
)


@pytest.mark.parametrize("text", ["R", "R*", "P", "S(0)", "S(12)"])
def test_text_form_is_read_back(text: str) -> None:
    assert str(Placement.parse(text)) == repr(Placement.parse(text)) == text


@pytest.mark.parametrize("text", ["", "r", "S", "S()", "S(-1)", "S(a)", "R**", "P ", "S(0)S(1)"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="unknown placement") as info:
        Placement.parse(text)
    assert "S(dim)" in info.value.next_step


def test_local_shapes() -> None:
    assert Shard(1).local_shape((3, 8, 5), 4) == (3, 2, 5)
    for whole in (Replicate, ReplicatePartialGrad, Partial):
        assert whole.local_shape((3, 8), 4) == (3, 8)
    with pytest.raises(PlanError, match="dim 0 of size 3 does not divide over 4 ranks"):
        Shard(0).local_shape((3, 8), 4)


def test_properties() -> None:
    assert [p.is_whole for p in (Replicate, ReplicatePartialGrad, Partial, Shard(0))] == [
        True,
        True,
        False,
        False,
    ]
    assert [p.gradient_is_partial for p in (Replicate, ReplicatePartialGrad, Partial)] == [
        False,
        True,
        False,
    ]
    assert Shard(0).is_shard and not Partial.is_shard


def test_they_compare_by_value() -> None:
    assert Shard(1) == Shard(1) != Shard(0) and Replicate != ReplicatePartialGrad
    assert len({Shard(1), Shard(1), Replicate}) == 2


def test_a_pinned_boundary_is_a_dim_of_what_passes_between_blocks() -> None:
    assert boundary_of("S(1)", [(2, 8, 4), (2, 8)]) == Shard(1)
    assert boundary_of("R", [(2, 8)]) == Replicate
    assert boundary_of("S(1)", []) == Shard(1)
    with pytest.raises(UsageError, match=r"boundary=S\(2\): what passes between blocks has 2 dims"):
        boundary_of("S(2)", [(2, 8, 4), (2, 8)])
