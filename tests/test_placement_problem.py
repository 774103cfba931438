"""The placement problem's own bookkeeping."""

from __future__ import annotations

from autopar.placement import Partial, Replicate
from autopar.placement_problem import Choice, OpNode, Problem


def test_an_op_gives_each_placement_once_in_the_order_of_its_choices() -> None:
    made = Problem()
    choices = [
        Choice("a", (), Partial, 1.0),
        Choice("b", (), Replicate, 2.0),
        Choice("c", (), Partial, 3.0),
    ]
    made.add(OpNode("x", (), choices))
    assert made.results("x") == (Partial, Replicate)
    assert made.sizes["x"] == {} and made.moves["x"] == {}


def test_sizes_known_before_are_kept() -> None:
    made = Problem()
    made.sizes["x"] = {Replicate: 8.0}
    made.add(OpNode("x", (), [Choice("a", (), Replicate, 0.0)]))
    assert made.sizes["x"] == {Replicate: 8.0}
