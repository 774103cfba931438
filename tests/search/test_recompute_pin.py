"""Blocks that are named are recomputed, whole, and no others: by every inner search, exactly."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.block_cost import BlockCost, ChainCost, with_last_holders
from autopar.cost.evaluate import evaluate
from autopar.cost.fullest_moment import stage_memory
from autopar.cost.setting import Setting
from autopar.errors import UsageError
from autopar.interleaving import refused
from autopar.mesh import Mesh
from autopar.search import columns, gathered, interleaved, stages
from autopar.search.chain import Chain
from autopar.search.enumerate import search
from autopar.search.infeasible import explain_infeasible
from autopar.search.options import Pins, SearchOptions, parse_pins
from autopar.search.recompute_pin import named_blocks, pinned_chain, recompute_mode
from tests.search.synthetic import Provider, cluster
from tests.search.test_gathered import alike_choices, assert_consistent, assert_same
from tests.search.test_gathered import brute_force as gathered_brute_force
from tests.search.test_interleaved import assert_as_evaluated, evaluated, every_size
from tests.search.test_stages import NUMBERS, SETS, block, brute_force, ties
from tests.search.test_stages import cluster as unit_cluster

SOME = st.lists(st.lists(SETS, max_size=1).map(tuple), min_size=6, max_size=6)
NAMED = st.sets(st.integers(0, 5), min_size=1)


def chain_of(numbers, named, partial, tied=0) -> list[BlockCost]:
    last = len(numbers) - 1
    blocks = with_last_holders(
        [block(i, x, ties(i, last, tied, ()), False, partial[i]) for i, x in enumerate(numbers)]
    )
    cost = ChainCost("R", "", tuple(blocks))
    return list(pinned_chain(cost, {f"b{i}" for i in named}).blocks)


def recomputed(found: stages.StageSolution) -> set[int]:
    assert not any(found.partial)
    return {i for part in found.recompute for i in part}


@settings(max_examples=150, deadline=None)
@given(
    numbers=st.lists(NUMBERS, min_size=3, max_size=6),
    pp=st.integers(1, 3),
    dp=st.sampled_from([1, 2]),
    zero=st.integers(0, 2),
    m=st.integers(1, 5),
    fraction=st.floats(0.3, 1.1),
    named=NAMED,
    partial=SOME,
    tied=st.sampled_from([0, 30]),
)
def test_stages_equal_brute_force(numbers, pp, dp, zero, m, fraction, named, partial, tied):
    blocks = chain_of(numbers, named, partial, tied)
    mesh = Mesh(pp, dp, 1)
    setting = Setting(unit_cluster(mesh.size), mesh, 1, m, "1f1b", zero, "bf16-mixed", "adamw")
    whole = max(stage_memory(blocks, 0, len(blocks), (), i, setting).total for i in range(pp))
    limit = int(whole * fraction)
    found = stages.solve(columns.build(blocks, setting), limit, recompute="full")
    assert_same(found, brute_force(blocks, setting, limit, "full"))
    if found is None:
        return
    assert recomputed(found) == {i for i in named if i < len(blocks)}
    for i, (a, b) in enumerate(itertools.pairwise(found.cuts)):
        names = {blocks[j].name for j in found.recompute[i]}
        assert stage_memory(blocks, a, b, names, i, setting).total == found.peaks[i] <= limit


@settings(max_examples=100, deadline=None)
@given(
    numbers=st.lists(NUMBERS, min_size=2, max_size=4),
    pp=st.integers(1, 2),
    m=st.integers(1, 4),
    fraction=st.floats(0.5, 1.05),
    named=NAMED,
    partial=SOME,
)
def test_kept_gathered_equals_brute_force(numbers, pp, m, fraction, named, partial):
    blocks = chain_of(numbers, named, partial)
    mesh = Mesh(pp, 2, 1)
    setting = Setting(unit_cluster(mesh.size), mesh, 1, m, "1f1b", 3, "bf16-mixed", "adamw")
    names = [b.name for b in blocks]
    whole = max(
        stage_memory(blocks, 0, len(blocks), (), i, setting, kept=names).total for i in range(pp)
    )
    limit = int(whole * fraction)
    found = gathered.solve(Chain(blocks), setting, limit, recompute="full")
    which = Chain(blocks).which.tolist()
    expected = gathered_brute_force(
        blocks, setting, limit, "full", lambda a, b: alike_choices(a, b, which)
    )
    assert_same(found, expected)
    if found is not None:
        assert recomputed(found) == {i for i in named if i < len(blocks)}
        assert_consistent(found, blocks, setting, limit)


@settings(max_examples=100, deadline=None)
@given(
    numbers=st.lists(NUMBERS, min_size=4, max_size=6),
    m=st.integers(2, 6),
    fraction=st.floats(0.5, 1.05),
    named=NAMED,
    partial=SOME,
)
def test_interleaved_equals_brute_force(numbers, m, fraction, named, partial):
    assume(not refused(2, m))
    blocks = chain_of(numbers, named, partial)
    setting = Setting(unit_cluster(2), Mesh(2, 1, 1), 1, m, "interleaved", chunks=2)
    labels = {i: "full" for i in named if i < len(blocks)}
    seen = [
        evaluated(blocks, setting, sizes, labels)
        for sizes in every_size(len(blocks), 4)
        if all(
            any(b.parameters for b in blocks[a:e])
            for a, e in itertools.pairwise(np.cumsum([0, *sizes]).tolist())
        )
    ]
    assume(seen)
    limit = int(max(s.peak_bytes for s in seen) * fraction)
    expected = min((s.step_seconds for s in seen if s.peak_bytes <= limit), default=math.inf)
    found = interleaved.solve(Chain(blocks), setting, limit, recompute="full")
    assert_same(found, expected)
    if found is not None:
        assert recomputed(found) == set(labels)
        assert_as_evaluated(found, blocks, setting)


OPTIONS = SearchOptions(8, "bf16")


@pytest.mark.parametrize(
    "pins", ["", "pp=2,schedule=1f1b", "pp=2,schedule=interleaved,chunks=2", "pp=1,dp=8,zero=3"]
)
def test_the_whole_search_recomputes_what_is_named(pins: str) -> None:
    named = ("layers.1", "layers.4", "head")
    given_pins = replace(parse_pins(pins), recompute=named)
    on = cluster(8)
    provider = Provider(on, sets=True)
    found = search(provider, on, replace(OPTIONS, pins=given_pins))
    assert found.choice is not None and found.status == "optimal"
    stages_ = found.choice.stages
    assert {name for stage in stages_ for name in stage.recompute} == set(named)
    assert not any(stage.selective for stage in stages_)
    seen = evaluate(found.choice, found.choice.chain.blocks, on)
    assert seen.step_seconds == pytest.approx(found.step_seconds)
    # The recipes are as they are without the pin.
    free = search(provider, on, OPTIONS)
    assert free.step_seconds is not None and found.step_seconds >= free.step_seconds
    own = {r.name: r.choice and r.choice.step_seconds for r in found.recipes}
    assert own == {r.name: r.choice and r.choice.step_seconds for r in free.recipes}


def test_too_little_memory_is_told_with_what_freeing_the_pin_gives() -> None:
    on, named = cluster(8), ("layers.0",)
    provider = Provider(on)
    pinned = replace(OPTIONS, pins=Pins(pp=1, tp=1, dp=8, zero=0, recompute=named))
    free = search(provider, on, pinned)
    assert free.choice is not None
    full = replace(pinned, pins=replace(pinned.pins, recompute="full"))
    least = search(provider, on, full).choice
    assert least is not None
    tight = replace(pinned, memory_limit=max(least.peaks))
    result = search(provider, on, tight)
    assert result.choice is None
    told = explain_infeasible(result, provider, on, tight).infeasible
    assert told is not None
    changes = {r.change: r.fits for r in told.relaxations}
    assert changes["free recompute=layers.0"]


def test_divided_backwards_recompute_nothing() -> None:
    pins = Pins(schedule="zbv", recompute=("layers.0",))
    with pytest.raises(UsageError, match="schedule=zbv can't be pinned with that"):
        search(Provider(cluster(2)), cluster(2), replace(OPTIONS, pins=pins))


@pytest.mark.parametrize(
    "text, step",
    [
        ("ful", "did you mean full"),
        ("Selective", "did you mean selective"),
        ("layers.0+layers.0", "each once"),
    ],
)
def test_what_can_not_be_meant_is_refused(text: str, step: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_pins(f"recompute={text}")
    assert step in str(error.value)


def test_an_unknown_block_is_named() -> None:
    pins = parse_pins("recompute=layers.0+layer.1")
    assert str(pins) == "recompute=layers.0+layer.1"
    assert recompute_mode(pins) == "full" and named_blocks(pins) == {"layers.0", "layer.1"}
    with pytest.raises(UsageError, match=r"recompute 'layer\.1': no such block") as error:
        search(Provider(cluster(2)), cluster(2), replace(OPTIONS, pins=pins))
    assert "did you mean layers.1" in str(error.value)
    pins = parse_pins("recompute=some")
    with pytest.raises(UsageError, match="choose one of none, selective, full, or name blocks"):
        search(Provider(cluster(2)), cluster(2), replace(OPTIONS, pins=pins))
