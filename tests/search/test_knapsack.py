"""Both knapsacks equal trying every count of every way; the relaxation is not above them."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.search import knapsack_frontier
from autopar.search.columns import Way
from autopar.search.knapsack import Items, cheapest, increments, items_of
from autopar.search.knapsack_frontier import KnapsackFrontiers

# Of a way: seconds, bytes freed, threshold.
WAYS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(-2, 30), st.integers(-9, 90)), min_size=1, max_size=4
)


def every_choice(items: Items, counts: list[int]) -> list[tuple[int, ...]]:
    """All counts of items such that no sort has more blocks than there are."""
    by_sort = []
    for sort, count in enumerate(counts):
        ways = int((items.sort == sort).sum())
        picks = itertools.product(range(count + 1), repeat=ways)
        by_sort.append([p for p in picks if sum(p) <= count])
    return [tuple(itertools.chain(*picks)) for picks in itertools.product(*by_sort)]


@settings(max_examples=150, deadline=None)
@given(
    sorts=st.lists(st.tuples(st.integers(1, 3), WAYS), min_size=1, max_size=3),
    need=st.integers(1, 60),
)
def test_both_knapsacks_equal_enumeration(sorts, need):
    ways, asked = [], []
    for sort, (_, found) in enumerate(sorts):
        for extra, gain, threshold in found:
            ways.append(Way(sort, f"set {len(ways)}", float(extra), gain, len(ways)))
            asked.append(threshold)
    items = items_of(ways, lambda way: np.array([asked[way.kind]]))
    every = items_of(ways, lambda way: np.array([0]) if way.gain > 0 else np.array([1]))
    assert len(every) <= len(items) <= len(ways)
    counts = [count for count, _ in sorts]
    if not len(items):
        return
    thresholds = [asked[k] for k in items.kind]
    expected = math.inf
    for pick in every_choice(items, counts):
        if any(pick) and np.dot(pick, items.gain) >= max(
            need, *(thresholds[d] for d, c in enumerate(pick) if c)
        ):
            expected = min(expected, float(np.dot(pick, items.extra)))
    one, choice = cheapest(items, counts, need, thresholds)
    assert one == pytest.approx(expected)
    if choice:
        assert tuple(choice) in every_choice(items, counts)
        assert float(np.dot(choice, items.extra)) == pytest.approx(one)
        assert np.dot(choice, items.gain) >= need
    many = KnapsackFrontiers(items).cheapest(
        np.array([counts, counts]), np.array([need, 10**6]), np.array([thresholds] * 2)
    )
    assert many is not None
    assert many[0] == pytest.approx(expected) and many[1] == math.inf


def test_of_two_ways_that_free_alike_the_cheaper_one_is_a_step() -> None:
    ways = [Way(0, "one", 0.0, 26, 0), Way(0, "other", 1.0, 26, 1)]
    items = items_of(ways, lambda way: np.array([[53], [0]][way.kind]))
    assert len(items) == 2
    (step,) = increments(items, range(2))
    assert items.labels[step.item] == "one"


def test_worse_ways_are_left_out() -> None:
    ways = [
        Way(0, "good", 1.0, 10, 0),
        Way(0, "slower", 2.0, 10, 1),
        Way(0, "frees nothing", 0.5, 0, 2),
        Way(0, "rebuilds less", 2.0, 10, 3),
    ]
    asked = {0: 5, 1: 5, 2: 0, 3: 4}
    labels = items_of(ways, lambda way: np.array([asked[way.kind]])).labels
    assert set(labels) == {"good", "rebuilds less"}


def test_steps_follow_the_hull_of_each_sort() -> None:
    ways = [
        Way(0, "a", 1.0, 10, 0),
        Way(0, "above the hull", 5.0, 12, 1),
        Way(0, "b", 5.0, 20, 2),
        Way(1, "c", 1.0, 5, 3),
    ]
    items = items_of(ways, lambda way: np.array([way.kind]))
    steps = increments(items, range(len(items)))
    found = [(items.labels[s.item], s.gain, s.extra) for s in steps]
    assert found == [("a", 10, 1.0), ("c", 5, 1.0), ("b", 10, 4.0)]


def test_too_long_a_staircase_is_left_to_single_knapsacks(monkeypatch) -> None:
    monkeypatch.setattr(knapsack_frontier, "MOST_LABELS", 20)
    generator = np.random.default_rng(0)
    ways = [
        Way(s, f"{s}", float(generator.random()), int(generator.integers(1, 10**9)), s)
        for s in range(16)
    ]
    items = items_of(ways, lambda way: np.array([0]))
    counts = np.ones((1, 16), np.int64)
    frontiers = KnapsackFrontiers(items)
    zeros = np.zeros((1, len(items)), np.int64)
    assert frontiers.cheapest(counts, np.array([10**8]), zeros) is None
