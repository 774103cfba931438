"""Which expert is in which slot."""

from __future__ import annotations

from autopar.runtime.slot_order import (
    EMPTY,
    has_copies,
    home_slots,
    natural_order,
    slot_order,
    slots_by_expert,
)

E = EMPTY


def test_neighbours_and_room_behind_them() -> None:
    assert natural_order(4, 2, 1) == (0, 1, E, 2, 3, E)
    assert natural_order(4, 4, 0) == (0, 1, 2, 3)
    assert home_slots((0, 1, E, 2, 3, E), 2) == (0, 1, 3, 4)


def test_homes_come_first_then_copies_then_nothing() -> None:
    order = slot_order(((1,), (0, 1), (0,), (1, 0)), 2, 4)
    # Both copied experts could be at home on rank 0; one is on rank 1, as sums come there too.
    assert order == (1, 2, 3, E, 0, 3, 1, E)
    assert home_slots(order, 2) == (4, 0, 1, 5)
    assert slots_by_expert(order) == [[4], [0, 6], [1], [2, 5]]
    assert has_copies(order)


def test_homes_are_spread_by_what_comes_to_them() -> None:
    everywhere = [(0, 1, 2, 3)] * 4
    order = slot_order(everywhere, 4, 4)
    assert sorted(slot // 4 for slot in home_slots(order, 4)) == [0, 1, 2, 3]


def test_unequal_counts_are_no_copies() -> None:
    order = slot_order(((1,), (1,), (1,), (0,)), 2, 3)
    assert order == (3, E, E, 0, 1, 2)
    assert not has_copies(order)


def test_what_is_the_order_of_ranks_without_room() -> None:
    assert slot_order(((1,), (0,), (0,), (1,)), 2, 2) == (1, 2, 0, 3)
