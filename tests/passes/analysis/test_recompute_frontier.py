"""The sets at the corners are those that trying all sets finds; collectives have their price."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.passes.analysis.kept_values import KeptValues, Unit, Value, kept_values
from autopar.passes.analysis.recompute_frontier import (
    corners,
    cut,
    op_names,
    recompute_frontier,
)
from autopar.passes.analysis.roofline import roofline
from autopar.passes.rewrite.localize_shapes import localize_shapes
from autopar.passes.rewrite.place import place
from autopar.workflow.rank_block import to_rank_block
from tests.passes import toys

MOST_UNITS = 8


@st.composite
def blocks(draw: st.DrawFn) -> tuple[KeptValues, list[float]]:
    """A random block: units in order, values made by one (or given) and read by later ones."""
    count = draw(st.integers(1, MOST_UNITS))
    units = [
        Unit(
            [],
            internal=4 * draw(st.sampled_from([0, 0, 0, 1, 3])),
            why_not=draw(st.sampled_from(["", "", "", "", "random"])),
        )
        for _ in range(count)
    ]
    values = []
    for maker in [None, *range(count)]:
        for _ in range(draw(st.integers(1 if maker is None else 0, 2))):
            later = list(range(0 if maker is None else maker + 1, count))
            readers = set(draw(st.lists(st.sampled_from(later), max_size=3))) if later else set()
            size = 4 * draw(st.integers(1, 20))
            values.append(Value(size, maker, readers, saved=draw(st.booleans())))
    seconds = [draw(st.integers(0, 50)) * 1e-6 for _ in range(count)]
    return KeptValues(tuple(units), tuple(values)), seconds


def every_set(found: KeptValues) -> list[frozenset[int]]:
    able = [i for i, u in enumerate(found.units) if not u.why_not]
    sets = chain.from_iterable(combinations(able, n) for n in range(len(able) + 1))
    return [frozenset(s) for s in sets]


@settings(max_examples=150, deadline=None)
@given(blocks(), st.sampled_from([0.0, 1e-8, 2e-7, 3e-6, 1e-3]))
def test_a_cut_costs_what_the_best_of_all_sets_costs(
    block: tuple[KeptValues, list[float]], price: float
) -> None:
    found, seconds = block

    def cost(again: frozenset[int]) -> float:
        return sum(seconds[i] for i in again) + price * found.kept(again)

    best = min(map(cost, every_set(found)))
    chosen = cut(found, seconds, price)
    assert all(not found.units[i].why_not for i in chosen)
    assert cost(chosen) == pytest.approx(best, rel=1e-9, abs=1e-15)


@settings(max_examples=80, deadline=None)
@given(blocks())
def test_corners_are_the_lower_hull_of_all_sets(block: tuple[KeptValues, list[float]]) -> None:
    found, seconds = block
    points = sorted(
        {(found.kept(s), round(sum(seconds[i] for i in s) * 1e6)) for s in every_set(found)}
    )
    hull: list[tuple[int, int]] = []
    for x, y in points:
        if hull and y >= hull[-1][1]:
            continue  # more bytes for no fewer seconds
        while len(hull) > 1 and _above(hull[-2], hull[-1], (x, y)):
            hull.pop()
        hull.append((x, y))
    made = [
        (found.kept(s), round(sum(seconds[i] for i in s) * 1e6)) for s in corners(found, seconds)
    ]
    assert [p for p in hull if p not in made] == []
    assert [b for b, _ in made] == sorted((b for b, _ in made), reverse=True)


def _above(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    """b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


def test_corners_of_a_block_are_priced_op_by_op() -> None:
    graph, slots = toys.block("mlp", "layers.0")
    place("layers.0", graph, slots, {}, toys.placement("R"), 1)
    localize_shapes(graph, 1)
    prices = {p.node: p.cost.forward_seconds for p in roofline(graph, toys.axis(1))}
    nodes = {name: node.name for node, name in op_names(graph).items()}
    found = recompute_frontier(graph, slots, toys.axis(1))
    saved = kept_values(graph, slots).kept(())
    before = saved
    for point in found:
        assert point.compute == pytest.approx(sum(prices[nodes[op]] for op in point.ops))
        assert point.comm == 0 and point.kept < before
        assert point.rebuilt > 0
        before = point.kept
    # At the end only the input is kept: the product of the second matrix is in no set.
    assert "linear.1" not in found[-1].ops
    assert found[-1].kept == 4 * toys.BATCH * toys.SEQUENCE * toys.WIDTH


def test_collectives_run_again_at_their_price() -> None:
    graph, slots = toys.block("mlp", "layers.0")
    to_rank_block("layers.0", graph, slots, toys.MEGATRON, toys.placement("S(1)"), 2)
    names = list(op_names(graph).values())
    gather = "all_gather_slice of input embedding"
    assert gather in names
    last = recompute_frontier(graph, slots, toys.axis(2))[-1]
    assert gather in last.ops
    price = next(p.cost for p in roofline(graph, toys.axis(2)) if p.op == "all_gather")
    assert last.comm == pytest.approx(price.forward_seconds) and last.comm > 0
