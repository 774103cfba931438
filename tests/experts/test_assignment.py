"""Assignments against every assignment there is, on small layers; bounds, errors, large layers."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import autopar
from autopar.errors import UsageError
from autopar.experts.assignment import Assignment, assign_experts
from autopar.experts.assignment_bound import best_copies, least_busiest
from autopar.experts.assignment_model import improved_by_solver
from autopar.experts.assignment_search import by_search
from autopar.experts.ranks_load import Holders, Request, rows_of_ranks


def every(request: Request) -> Iterator[Holders]:
    """All legal assignments, by trying all sets of ranks for each expert."""
    sets = [
        s
        for n in range(1, request.most_copies + 1)
        for s in itertools.combinations(range(request.ranks), n)
    ]
    for holders in itertools.product(sets, repeat=len(request.load)):
        if is_legal(request, holders):
            yield holders


def is_legal(request: Request, holders: Holders) -> bool:
    held = [0] * request.ranks
    for ranks in holders:
        assert len(set(ranks)) == len(ranks) >= 1
        for rank in ranks:
            held[rank] += 1
    extra = sum(held) - len(request.load)
    if request.equal:
        return set(held) == {request.slots} and extra == request.replicas
    return max(held) <= request.slots and extra <= request.replicas


def best(request: Request) -> float:
    return min(max(rows_of_ranks(request, holders)) for holders in every(request))


@st.composite
def requests(draw: Any) -> Request:
    ranks = draw(st.integers(1, 3))
    experts = draw(st.integers(ranks, 5 if ranks < 3 else 4))
    load = tuple(draw(st.lists(st.integers(0, 30), min_size=experts, max_size=experts)))
    if draw(st.booleans()):
        least = -(-experts // ranks)
        most = draw(st.integers(least, least + 1))
        return Request.of("x", load, ranks, 1, draw(st.integers(0, min(2, ranks - 1))), most)
    replicas = -experts % ranks
    if ranks > 1 and draw(st.booleans()):
        replicas += ranks
    replicas = min(replicas, experts * (ranks - 1))
    return Request.of("x", load, ranks, 1, replicas, None)


@settings(max_examples=60, deadline=None)
@given(requests())
def test_bound_holds_and_search_is_legal(request: Request) -> None:
    least, found = best(request), by_search(request)
    assert is_legal(request, found)
    assert least_busiest(request) <= least + 1e-9 <= max(rows_of_ranks(request, found)) + 2e-9


@settings(max_examples=25, deadline=None)
@given(requests())
@example(Request(load=(0, 1, 5), ranks=2, nodes=1, replicas=1, slots=2, equal=True))
@example(Request(load=(0, 0, 0), ranks=2, nodes=1, replicas=1, slots=2, equal=True))
def test_the_solver_finds_and_proves_the_best(request: Request) -> None:
    least, bound = best(request), least_busiest(request)
    found, proven = improved_by_solver(request, by_search(request), bound, 20.0, 0)
    assert is_legal(request, found)
    assert max(rows_of_ranks(request, found)) == pytest.approx(least, rel=1e-6, abs=1e-6)
    assert max(bound, proven) == pytest.approx(least, rel=1e-6, abs=1e-6)


def test_copies_go_where_the_part_is_largest() -> None:
    assert best_copies([12, 7, 5], 3, 4) == [3, 2, 1]
    assert best_copies([12, 7, 5], 3, 2) == [2, 2, 2]


def test_a_layer_that_neighbours_and_turns_place_badly() -> None:
    load = {"a": [8, 1, 7, 1, 9, 1, 6, 3]}
    layer = assign_experts(load, 2).layers["a"]
    assert (layer.contiguous, layer.round_robin) == (19, 30)
    assert layer.busiest == layer.bound == 18 and layer.optimal and layer.gap == 0


def test_a_hot_expert_is_replicated() -> None:
    load = {"a": [100, 10, 10, 10, 10, 10]}
    alone = assign_experts(load, 2).layers["a"]
    shared = assign_experts(load, 2, replicas=2).layers["a"]
    assert alone.busiest == 120
    assert len(shared.holders[0]) == 2
    assert shared.busiest == shared.bound == 75 and shared.optimal


def test_slots_that_a_plan_has_to_have() -> None:
    load = {"a": [9.0, 1, 1, 1], "b": [1.0, 1, 1, 1]}
    assert assign_experts(load, 2).spare_experts == 0
    assert assign_experts(load, 2, replicas=2).spare_experts == 1
    free = assign_experts(load, 2, most=4)
    assert free.layers["a"].most == 3 and free.spare_experts == 1
    assert assign_experts(load, 4, replicas=4).layers["a"].most == 2


def test_free_counts_leave_a_hot_expert_alone() -> None:
    load = {"a": [100, 10, 10, 10, 10, 10]}
    layer = assign_experts(load, 2, most=5).layers["a"]
    assert layer.busiest == 100 and layer.optimal
    assert assign_experts(load, 2, most=4).layers["a"].busiest == 110


@pytest.mark.parametrize(("experts", "ranks"), [(64, 8), (256, 64)])
@pytest.mark.parametrize("skew", [0.5, 1.0])
def test_zipf_loads(experts: int, ranks: int, skew: float) -> None:
    # Spread over the numbers by a step that has no factor in common with their count.
    rows = [0] * experts
    for place in range(experts):
        rows[place * 37 % experts] = round(1e6 / (place + 1) ** skew)
    layer = assign_experts({"a": rows}, ranks, time_limit=2.0).layers["a"]
    assert layer.bound <= layer.busiest <= layer.round_robin
    assert layer.gap <= 1e-3
    assert layer.busiest < layer.contiguous
    assert layer.seconds < 5


def test_layers_are_assigned_by_themselves() -> None:
    found = assign_experts({"a": [4, 3, 2, 1], "b": [1, 1, 5, 5]}, 2)
    assert found.layers["a"].busiest == 5 and found.layers["b"].busiest == 6
    assert found.status == "optimal"


def test_no_rows_are_no_load() -> None:
    layer = assign_experts({"a": [0, 0, 0, 0]}, 2).layers["a"]
    assert layer.busiest == 0 and layer.optimal


def test_what_is_chosen_together_shares_a_node() -> None:
    # Even and odd experts go together; every exchange keeps the rows.
    pairs = [[float(a != b and a % 2 == b % 2) for b in range(8)] for a in range(8)]
    found = assign_experts({"a": [5] * 8}, 4, nodes=2, together={"a": pairs}).layers["a"]
    assert found.on_node == 1.0
    assert found.busiest == 10
    node = [ranks[0] // 2 for ranks in found.holders]
    assert len(set(node[::2])) == len(set(node[1::2])) == 1


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=8, max_size=8), st.randoms(use_true_random=False))
def test_together_never_costs_the_busiest_rank(rows: list[int], draw: Any) -> None:
    pairs = [[draw.randint(0, 5) for _ in rows] for _ in rows]
    alone = assign_experts({"a": rows}, 4, nodes=2).layers["a"]
    near = assign_experts({"a": rows}, 4, nodes=2, together={"a": pairs}).layers["a"]
    request = Request.of("a", tuple(rows), 4, 2, 0, None)
    assert is_legal(request, near.holders)
    assert max(rows_of_ranks(request, near.holders)) <= alone.busiest + 1e-9
    assert near.on_node is not None and 0 <= near.on_node <= 1


def test_round_trip_and_file(tmp_path: Path) -> None:
    path = tmp_path / "load.json"
    path.write_text(json.dumps({"a": [1, 2, 3, 4]}))
    found = autopar.assign_experts(path, 2)
    again = Assignment.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again == found
    with pytest.raises(UsageError, match="no assignment of experts"):
        Assignment.from_dict({"ranks": 2})


@pytest.mark.parametrize(
    ("load", "ranks", "more", "said"),
    [
        ({"a": [1] * 6}, 4, {}, "6 experts of layer 'a' do not divide by 4 ranks"),
        ({"a": [1] * 4}, 4, {"replicas": 2}, "2 on a rank run under a plan with spare_experts=1"),
        ({"a": [1] * 4}, 8, {}, "8 ranks for the 4 experts"),
        ({"a": [1, -1]}, 2, {}, "expert 1 of layer 'a' is -1"),
        ({"a": [1, float("nan")]}, 2, {}, "expert 1 of layer 'a' is nan"),
        ({"a": [1, float("inf")]}, 2, {}, "is inf"),
        ({"a": [1, "2"]}, 2, {}, "is '2'"),
        ({"a": [1, True]}, 2, {}, "is True"),
        ({"a": []}, 2, {}, "no list of rows"),
        ({"a": "12"}, 2, {}, "no list of rows"),
        ({}, 2, {}, "without layers"),
        ([1, 2], 2, {}, "not list"),
        ({"a": [1, 1]}, 0, {}, "ranks=0"),
        ({"a": [1, 1]}, 2, {"nodes": 0}, "nodes=0"),
        ({"a": [1, 1]}, 2, {"replicas": -1}, "replicas=-1"),
        ({"a": [1] * 4}, 4, {"nodes": 3}, "4 ranks on 3 nodes"),
        ({"a": [1] * 4}, 2, {"replicas": 6}, "4 more than one of each"),
        ({"a": [1] * 4}, 2, {"most": 1}, "most=1"),
        ({"a": [1] * 4}, 2, {"together": {"b": [[1]]}}, "has layer 'b'"),
        ({"a": [1] * 2}, 2, {"together": {"a": [[1]]}}, "shape"),
        ({"a": [1] * 2}, 2, {"together": {"a": [[0, -1], [1, 0]]}}, "negative"),
        ({"a": [1] * 2}, 2, {"together": {"a": [["x"]]}}, "no matrix"),
        ({"a": [1] * 2}, 2, {"together": {"a": [[0] * 2] * 2}, "replicas": 2}, "replicas=0"),
    ],
)
def test_bad_input(load: Any, ranks: int, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        assign_experts(load, ranks, **more)
    assert caught.value.next_step


def test_a_load_of_the_wrong_length() -> None:
    with pytest.raises(UsageError, match="layer 'b' has 3 numbers, there are 4 experts"):
        assign_experts({"a": [1] * 4, "b": [1] * 3}, 2, experts=4)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="can't be read"):
        assign_experts(tmp_path / "none.json", 2)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(UsageError, match="is no JSON"):
        assign_experts(tmp_path / "bad.json", 2)
