"""Both exact placement searches against enumeration, on small random problems."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import InfeasibleError
from autopar.placement import Partial, Placement, Replicate, Shard
from autopar.placement_problem import Choice, OpNode, Problem
from autopar.search import placements
from autopar.search.elimination import eliminate
from autopar.search.placement_objective import (
    TIE,
    Solution,
    brute_force,
    evaluate,
    seconds_by_block,
)
from autopar.search.placement_program import Model

R, P, S0 = Replicate, Partial, Shard(0)
PLACEMENTS = (R, P, S0)
SHAPES = {
    "chain": [(), (0,), (1,), (2,)],
    "diamond": [(), (0,), (0,), (1, 2)],
    "fan": [(), (0,), (0,), (0,)],
    "two sources": [(), (), (0, 1), (2, 0)],
}
PRICES = (0.0, 1e-12, 1e-10)
SECONDS = st.integers(0, 50).map(lambda n: n * 1e-6)
BYTES = st.integers(0, 8).map(lambda n: float(n * 2**20))


@st.composite
def problems(draw: Any) -> Problem:
    """Four ops of up to three choices; some moves are illegal, some memory is shared."""
    made = Problem()
    shape = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    names = [f"op{i}" for i in range(len(shape))]
    for name, reads in zip(names, shape, strict=True):
        count = draw(st.integers(1, 3))
        choices = [
            Choice(
                f"c{k}",
                tuple(draw(st.sampled_from(PLACEMENTS)) for _ in reads),
                draw(st.sampled_from(PLACEMENTS)),
                draw(SECONDS),
                draw(BYTES),
            )
            for k in range(count)
        ]
        saved = frozenset(i for i in range(len(reads)) if draw(st.booleans()))
        op = OpNode(name, tuple(names[i] for i in reads), choices, saved, draw(st.booleans()))
        made.add(op)
        for placement in PLACEMENTS:
            made.sizes[name][placement] = draw(BYTES)
    for name in names:
        for source in PLACEMENTS:
            for target in PLACEMENTS:
                if source == target:
                    made.moves[name][source, target] = 0.0
                elif draw(st.integers(0, 5)):
                    made.moves[name][source, target] = draw(SECONDS)
    made.sinks[names[-1]] = draw(st.sampled_from(PLACEMENTS))
    if draw(st.booleans()):
        made.stored[names[0]] = draw(st.sampled_from([1.0, 4.0]))
    if draw(st.booleans()):
        made.roots[names[1]] = names[0]
    return made


def by_program(problem: Problem, price: float = 0.0, in_flight: float = 1.0) -> Solution:
    return Model(problem, in_flight).solve(price)


def by_elimination(problem: Problem, price: float = 0.0, in_flight: float = 1.0) -> Solution:
    found = eliminate(problem, (price,), in_flight=in_flight)
    assert found is not None
    return found[0]


either = pytest.mark.parametrize("solve", [by_program, by_elimination])


@either
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(problem=problems(), price=st.sampled_from(PRICES), in_flight=st.sampled_from([1.0, 3.0]))
def test_the_optimum_is_that_of_enumeration(
    solve: Any, problem: Problem, price: float, in_flight: float
) -> None:
    best = brute_force(problem, price=price, in_flight=in_flight)
    if best == float("inf"):
        with pytest.raises(InfeasibleError, match="no legal placement"):
            solve(problem, price, in_flight)
        return
    found = solve(problem, price, in_flight)
    assert (found.seconds, found.bytes) == evaluate(problem, found.choice, in_flight=in_flight)
    assert found.seconds + (price + TIE) * found.bytes == pytest.approx(best, rel=1e-6, abs=1e-13)


def fan(readers: int, *, move: float) -> Problem:
    """One value made as P, read by several ops as R."""
    made = Problem()
    made.add(OpNode("x", (), [Choice("make", (), P, 0.0)]))
    made.sizes["x"] = {P: 8.0, R: 8.0}
    made.moves["x"] = {(P, R): move}
    for i in range(readers):
        made.add(OpNode(f"y{i}", ("x",), [Choice("read", (R,), R, 1e-6)]))
        made.sizes[f"y{i}"] = {R: 8.0}
    return made


@either
def test_a_move_that_several_ops_want_is_paid_once(solve: Any) -> None:
    assert solve(fan(1, move=5e-6)).seconds == pytest.approx(6e-6)
    assert solve(fan(3, move=5e-6)).seconds == pytest.approx(8e-6)


@either
def test_different_moves_of_one_value_are_each_paid(solve: Any) -> None:
    made = fan(2, move=5e-6)
    made.ops[-1] = OpNode("y1", ("x",), [Choice("read", (S0,), S0, 1e-6)])
    made.moves["x"][P, S0] = 2e-6
    made.sizes["x"][S0] = 4.0
    made.sizes["y1"] = {S0: 4.0}
    assert solve(made).seconds == pytest.approx(9e-6)


def saving(made: Problem, *ops: str) -> Problem:
    for op in made.ops:
        if op.name in ops:
            op.saved = frozenset({0})
    return made


@either
def test_a_value_that_several_ops_save_is_kept_once(solve: Any) -> None:
    once = solve(saving(fan(2, move=0.0), "y0")).bytes
    assert solve(saving(fan(2, move=0.0), "y0", "y1")).bytes == once == 8.0


@either
def test_views_and_their_root_are_one_memory_and_parameters_none(solve: Any) -> None:
    made = fan(1, move=0.0)
    made.add(OpNode("z", ("y0",), [Choice("read", (R,), R, 0.0)], frozenset({0})))
    made.moves["y0"] = {(R, R): 0.0}
    made.sizes["z"] = {R: 8.0}
    saving(made, "y0")
    assert solve(made).bytes == 16.0
    made.roots["y0"] = "x"
    assert solve(made).bytes == 8.0
    made.stored["x"] = 4.0
    assert solve(made).bytes == 32.0


def two_ways() -> Problem:
    """Fast and large, or slow and small."""
    made = Problem()
    choices = [Choice("fast", (), R, 1e-6, 8e6), Choice("small", (), R, 3e-6, 2e6)]
    made.add(OpNode("x", (), choices))
    made.sizes["x"] = {R: 1.0}
    return made


@either
def test_the_price_of_memory_walks_the_frontier(solve: Any) -> None:
    assert solve(two_ways(), 0.0).choice == {"x": "fast"}
    assert solve(two_ways(), 1e-12).choice == {"x": "small"}
    # More microbatches in flight make the same byte dearer.
    assert solve(two_ways(), 1e-13, 4.0).choice == {"x": "small"}
    assert solve(two_ways(), 1e-13, 1.0).choice == {"x": "fast"}


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(problems())
def test_all_prices_at_once_are_each_price_alone(problem: Problem) -> None:
    if brute_force(problem) == float("inf"):
        return
    together = eliminate(problem, PRICES)
    assert together == [by_elimination(problem, price) for price in PRICES]


def test_a_graph_too_entangled_for_tables_goes_to_the_integer_program() -> None:
    made = fan(3, move=5e-6)
    assert eliminate(made, PRICES, most_entries=2) is None
    for op in made.ops[1:]:
        op.choices.append(Choice("other", (P,), R, 9e-6))
    made.moves["x"][P, P] = 0.0
    crowd = fan(30, move=5e-6)
    for op in crowd.ops[1:]:
        op.choices.append(Choice("other", (P,), R, 9e-6))
    crowd.moves["x"][P, P] = 0.0
    assert eliminate(crowd, PRICES) is None  # one value with thirty readers: 2 ** 30 entries
    small, large = placements.solve(made, PRICES)[0], placements.solve(crowd, PRICES)[0]
    assert small.seconds == pytest.approx(8e-6) and large.seconds == pytest.approx(35e-6)


def test_seconds_by_block_are_those_of_the_whole_but_for_stored_parameters() -> None:
    made = Problem()
    made.add(OpNode("parameter w", (), [Choice("R*", (), R, 3e-6)]))
    made.stored["parameter w"] = 4.0
    made.add(OpNode("a|use", ("parameter w",), [Choice("R", (R,), P, 1e-6)]))
    made.add(OpNode("b|use", ("parameter w",), [Choice("R", (R,), R, 2e-6)]))
    made.sinks["a|use"] = R
    made.moves |= {"parameter w": {(R, R): 0.0}, "a|use": {(P, R): 4e-6}}
    made.sizes = {name: {R: 8.0, P: 8.0} for name in ("parameter w", "a|use", "b|use")}
    chosen = by_elimination(made).choice
    assert evaluate(made, chosen)[0] == pytest.approx(10e-6)
    assert seconds_by_block(made, chosen) == pytest.approx({"a": 5e-6, "b": 2e-6})


@either
def test_equal_times_are_decided_by_memory(solve: Any) -> None:
    made = two_ways()
    made.ops[0].choices[1].seconds = 1e-6
    assert solve(made).choice == {"x": "small"}


@either
def test_no_legal_combination(solve: Any) -> None:
    made = fan(1, move=0.0)
    made.moves["x"] = {}
    assert brute_force(made) == float("inf")
    with pytest.raises(InfeasibleError, match="no legal placement") as info:
        solve(made)
    assert info.value.next_step


@either
def test_what_is_handed_out_is_moved_too(solve: Any) -> None:
    made = fan(1, move=0.0)
    sink: Placement = S0
    made.sinks["y0"] = sink
    made.sizes["y0"][sink] = 4.0
    made.moves["y0"] = {(R, sink): 7e-6}
    assert solve(made).seconds == pytest.approx(8e-6)
