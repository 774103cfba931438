"""The cuts that are searched where parts of a chain take turns."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.setting import Setting
from autopar.mesh import Mesh
from autopar.search import interleaved, zero_bubble
from autopar.search.chain import Chain
from autopar.search.enumerate import search
from autopar.search.interleaved import balanced as looking
from autopar.search.interleaved.balanced import balanced
from autopar.search.interleaved.candidates import all_are_searched, candidates
from autopar.search.interleaved.cuts import cuts, legal_cuts
from autopar.search.interleaved.moves import ENDS
from autopar.search.interleaved.work import load_of, work_of
from autopar.search.options import Pins, SearchOptions
from autopar.search.prices import Prices
from tests.search.synthetic import Provider, cluster
from tests.search.test_interleaved import every_size
from tests.search.test_stages import block

SCHEDULES = ("interleaved", "zero-bubble", "zbv")


def near_even(blocks: int, parts: int, pp: int) -> set[tuple[int, ...]]:
    """The family of `cuts` as its text tells it, by trying all sizes."""
    if parts == 2:
        return {(first, blocks - first) for first in range(1, blocks)}
    even = -(-blocks // parts)
    close = [*range(even - 4, even + 3), 1, 2, *(even - 2**k for k in range(3, 12))]
    found = set()
    for first, last in product({size for size in close if size > 0}, repeat=2):
        rest, between = blocks - first - last, parts - 2
        if rest < between:
            continue
        share, more = divmod(rest, between)
        for start in range(min(pp, between)):
            middle = [share] * between
            for i in range(more):
                middle[(start + i) % between] += 1
            found.add((first, *middle, last))
    return found


def sizes(edges) -> set[tuple[int, ...]]:
    return {tuple(b - a for a, b in pairwise(row)) for row in edges.tolist()}


@given(st.integers(2, 40), st.integers(1, 4), st.integers(1, 4))
def test_near_even_cuts_are_those_of_the_text(blocks, pp, chunks):
    if pp * chunks > 1:
        assert sizes(cuts(blocks, pp, chunks)) == near_even(blocks, pp * chunks, pp)


def made_up(layers: int, kinds: int, seed: int) -> Chain:
    """Layers that take 1 to `kinds` times as long, in any order."""
    draw = random.Random(seed)
    found = []
    for i in range(layers):
        times = draw.randint(1, kinds)
        found.append(block(i, (10 * times, 20 * times, 0, 40, 60, 20, 10, 5)))
    return Chain(found)


def setting(pp: int, chunks: int, schedule: str, microbatches: int = 0) -> Setting:
    on = cluster(pp, memory=2**50)
    many = microbatches or 8 * pp
    return Setting(on, Mesh(pp, 1, 1), 1, many, schedule, 0, "fp32", "adamw", chunks)


@pytest.mark.parametrize(("layers", "pp", "chunks"), [(6, 2, 2), (9, 3, 2), (12, 2, 1), (14, 2, 2)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_few_cuts_are_searched_one_and_all(layers, pp, chunks, schedule):
    if schedule == "zbv" and chunks != 2:
        return
    assert all_are_searched(layers, pp * chunks)
    chain = made_up(layers, 3, 1)
    found = candidates(chain, setting(pp, chunks, schedule), None)
    assert sizes(found) == set(every_size(layers, pp * chunks))
    assert len(found) == len(sizes(found))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(20, 60), st.integers(2, 6), st.integers(2, 3), st.integers(0, 99), st.integers(1, 4)
)
def test_cuts_by_work_are_legal_and_beside_the_near_even_ones(layers, pp, chunks, seed, kinds):
    chain = made_up(layers, kinds, seed)
    for schedule in SCHEDULES[: 3 if chunks == 2 else 2]:
        found = candidates(chain, setting(pp, chunks, schedule), None)
        assert (np.diff(found, axis=1) > 0).all()
        assert (found[:, 0] == 0).all()
        assert (found[:, -1] == layers).all()
        even = legal_cuts(chain.cutting, pp, chunks, schedule == "zbv")
        both = {r.tobytes() for r in even} & {r.tobytes() for r in found}
        assert len(both) >= min(len(even), looking.MOST_EVEN)


def test_they_hold_what_balances_unlike_blocks():
    """Two heavy blocks, far apart, among light ones: the ranks that hold them take fewer others."""
    times = [12 if i in (5, 30) else 1 for i in range(40)]
    chain = Chain([block(i, (10 * t, 20 * t, 0, 40, 60, 20, 10, 5)) for i, t in enumerate(times)])
    for schedule in SCHEDULES:
        on = setting(4, 2, schedule)
        assert not all_are_searched(40, 8)
        work = np.array([b.seconds for b in chain.blocks])
        total = np.concatenate([[0], np.cumsum(work)])

        def busiest(edges, total=total, on=on):
            parts = np.diff(total[edges], axis=1)
            ranks = [parts[:, list(on.parts_of(r))].sum(axis=1) for r in range(4)]
            return np.max(ranks, axis=0).min()

        even = busiest(legal_cuts(chain.cutting, 4, 2, schedule == "zbv"))
        both = busiest(candidates(chain, on, None))
        assert both < 0.93 * even
        assert both <= 1.15 * work.sum() / 4


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_move_of_one_border_gains_much(schedule):
    """Of plans that memory does not limit, and of unlike blocks."""
    find = interleaved.solve if schedule == "interleaved" else zero_bubble.solve
    worst = 0.0
    for seed in range(6):
        chain, on = made_up(48, 4, seed), setting(4, 2, schedule)
        best = find(chain, on, 2**50)
        assert best is not None
        for i, step in product(range(1, 8), (-1, 1)):
            cut = list(best.cuts)
            cut[i] += step
            if cut[i - 1] < cut[i] < cut[i + 1]:
                moved = find(chain, on, 2**50, starts=cut[:-1])
                assert moved is not None
                worst = max(worst, 1 - moved.objective / best.objective)
    assert worst < 0.02


def test_work_is_that_of_the_bounds_whatever_is_known_of_prices():
    prices = Prices(Provider(cluster(8), layers=30))
    on = setting(4, 2, "interleaved")
    on = replace(on, mesh=Mesh(4, 1, 2), cluster=cluster(8))
    bounds = prices.optimistic(on)
    for number in prices.alternatives(on):
        for chain in (prices.sketch(on, number), prices.chain(on, number)[1]):
            assert work_of(chain, on) == work_of(bounds, on)
            assert load_of(chain, on) == load_of(bounds, on)
            assert (candidates(chain, on, None) == candidates(bounds, on, None)).all()


def test_a_plan_says_where_not_all_cuts_were_searched():
    pins = Pins(pp=4, schedule="interleaved", chunks=2)
    for layers, told in ((30, True), (8, False)):
        provider = Provider(cluster(4), layers=layers)
        found = search(provider, provider.on, SearchOptions(16, pins=pins), explain=False)
        assert any("cuts" in note for note in found.notes) == told


def test_looking_ends(monkeypatch):
    """Cuts of a long chain are not simulated: they are at even shares of the work."""
    chain = made_up(1000, 5, 0)
    on = setting(32, 8, "interleaved")
    monkeypatch.setattr(looking, "seconds_of_many", lambda *_: pytest.fail("it was simulated"))
    found = balanced(work_of(chain, on), chain.cutting, "interleaved", 32, 8)
    assert 1 <= len(found) <= len(ENDS) ** 2 + looking.MOST_EVEN


def test_cuts_are_found_where_none_is_near_even():
    """Four blocks among forty may end a part, all in the back."""
    blocks = [block(i, (10, 20, 0, 40, 60, 20, 10, 5)) for i in range(40)]
    ends = (30, 34, 35, 36, 37, 38, 39)
    chain = Chain([replace(b, can_end_stage=i in ends) for i, b in enumerate(blocks)])
    for schedule in SCHEDULES:
        on = setting(2, 2, schedule)
        assert not len(legal_cuts(chain.cutting, 2, 2, schedule == "zbv"))
        assert len(candidates(chain, on, None))


def test_cuts_that_balance_bytes_make_room():
    """The blocks that take the most bytes take the least time."""
    sizes = [(10, 20, 0, 4000, 60, 20, 10, 5), (40, 80, 0, 40, 60, 20, 10, 5)]
    chain = Chain([block(i, sizes[i >= 12]) for i in range(48)])
    on = setting(4, 2, "interleaved")
    assert not all_are_searched(48, 8)
    found = candidates(chain, on, None)
    states = np.array([b.parameters for b in chain.blocks])
    total = np.concatenate([[0], np.cumsum(states)])

    def fullest(edges):
        parts = np.diff(total[edges], axis=1)
        return np.max([parts[:, list(on.parts_of(r))].sum(axis=1) for r in range(4)], axis=0).min()

    assert fullest(found) < 0.75 * fullest(legal_cuts(chain.cutting, 4, 2, turns=False))


def test_the_end_of_a_step_is_balanced_too():
    """Blocks that take the same time for a micro-batch, and one half much at the end of a step."""
    blocks = [block(i, (10, 20, 0, 40, 60, 20, 10, 5)) for i in range(40)]
    heavy = [
        replace(b, parameter_reduce_seconds=400 * b.seconds if i < 20 else 0.0)
        for i, b in enumerate(blocks)
    ]
    on = setting(4, 1, "zero-bubble")
    found = [zero_bubble.solve(Chain(of), on, 2**50) for of in (blocks, heavy)]
    even, uneven = (np.diff(f.cuts) for f in found if f is not None)
    assert even.max() - even.min() <= 2
    assert uneven[0] < even[0]
    assert uneven[-1] > even[-1]
