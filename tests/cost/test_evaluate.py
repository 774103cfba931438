"""The second opinion: agrees with the search on random problems, and notices when it must not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.block_cost import ChainCost
from autopar.cost.evaluate import assert_agrees, evaluate, evaluate_setting
from autopar.cost.fullest_moment import stage_memory
from autopar.cost.setting import Setting
from autopar.cost.step import BREAKDOWN
from autopar.errors import PassError, PlanError
from autopar.mesh import Mesh
from autopar.plan_document import StagePlan
from autopar.search import columns, stages
from autopar.search.result import Choice
from tests.search.synthetic import Provider, cluster
from tests.search.test_stages import NUMBERS, SETS, block, ties
from tests.search.test_stages import cluster as unit_cluster


@settings(max_examples=200, deadline=None)
@given(
    numbers=st.lists(NUMBERS, min_size=3, max_size=8),
    pp=st.integers(1, 3),
    dp=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    m=st.integers(1, 6),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    precision=st.sampled_from(["fp32", "bf16-mixed", "bf16"]),
    fraction=st.floats(0.3, 1.1),
    tied=st.sampled_from([0, 30]),
    inner=st.sampled_from([(), (1, 2), (0, 1), (0, 2, 3)]),
    frozen=st.booleans(),
    partial=st.lists(st.lists(SETS, max_size=3).map(tuple), min_size=8, max_size=8),
)
def test_agrees_with_the_search(
    numbers, pp, dp, zero, m, schedule, precision, fraction, tied, frozen, partial, inner
):
    last = len(numbers) - 1
    blocks = [
        block(i, x, ties(i, last, tied, inner), frozen, partial[i]) for i, x in enumerate(numbers)
    ]
    setting = Setting(unit_cluster(pp * dp), Mesh(pp, dp, 1), 1, m, schedule, zero, precision)
    limit = stage_memory(blocks, 0, len(blocks), (), 0, setting).total * fraction
    found = stages.solve(columns.build(blocks, setting), limit)
    if found is None:
        return
    choice = Choice.of(setting, ChainCost("R", "x", tuple(blocks)), found)
    seen = evaluate(choice, blocks, setting.cluster)
    assert_agrees(choice, seen)
    assert set(seen.time_breakdown) == set(BREAKDOWN)
    assert all(seconds >= 0 for seconds in seen.time_breakdown.values())
    assert sum(seen.time_breakdown.values()) == pytest.approx(seen.step_seconds, rel=1e-12)
    assert seen.in_flight == tuple(setting.in_flight(i) for i in range(pp))
    assert seen.peak_bytes <= limit


def even_choice(pp: int = 2, m: int = 4, recompute: bool = False) -> tuple[Choice, Provider]:
    provider = Provider(cluster(pp), layers=4)
    chain = provider.chains(1, 1)[0]
    layers = tuple(replace(chain.blocks[1], name=f"b{i}", boundary_bytes=0) for i in range(4))
    chain = ChainCost("R", "x", layers)
    setting = Setting(provider.on, Mesh(pp, 1, 1), 1, m, "1f1b")
    names = [b.name for b in layers]
    size = 4 // pp
    plan = tuple(
        StagePlan(tuple(names[i : i + size]), tuple(names[i : i + size]) if recompute else ())
        for i in range(0, 4, size)
    )
    return Choice(setting, chain, plan, 0.0, ()), provider


def test_simulation_equals_the_closed_form_for_even_stages():
    choice, provider = even_choice()
    seen = evaluate(choice, choice.chain.blocks, provider.on)
    end = seen.time_breakdown["optimizer"] + seen.time_breakdown["dp_comm"]
    assert seen.simulated_seconds == pytest.approx(seen.step_seconds - end, rel=1e-12)
    assert len(seen.events()) == 2 * 2 * 4
    assert seen.time_breakdown["bubble"] == pytest.approx(seen.stage_seconds[0])


def test_recomputation_is_booked_as_such():
    plain, provider = even_choice()
    again, _ = even_choice(recompute=True)
    one = evaluate(plain, plain.chain.blocks, provider.on)
    two = evaluate(again, again.chain.blocks, provider.on)
    forward = sum(b.forward for b in plain.chain.blocks[:2])
    assert one.time_breakdown["recompute"] == 0
    assert two.time_breakdown["recompute"] == pytest.approx(4 * forward)
    assert two.time_breakdown["compute"] == pytest.approx(one.time_breakdown["compute"])
    assert two.memory_per_stage[0].activations < one.memory_per_stage[0].activations


def test_a_wrong_objective_or_peak_is_refused():
    choice, provider = even_choice()
    seen = evaluate(choice, choice.chain.blocks, provider.on)
    peaks = tuple(m.total for m in seen.memory_per_stage)
    assert_agrees(replace(choice, step_seconds=seen.step_seconds, peaks=peaks), seen)
    for wrong in (
        replace(choice, step_seconds=seen.step_seconds * (1 + 1e-6), peaks=peaks),
        replace(choice, step_seconds=seen.step_seconds, peaks=(peaks[0] - 1, *peaks[1:])),
    ):
        with pytest.raises(PassError, match="a fault of autopar"):
            assert_agrees(wrong, seen)
    hidden = replace(seen, time_breakdown={**seen.time_breakdown, "bubble": 0.0})
    with pytest.raises(PassError, match="time breakdown"):
        assert_agrees(replace(choice, step_seconds=seen.step_seconds, peaks=peaks), hidden)


def test_blocks_out_of_order_are_refused():
    choice, provider = even_choice()
    with pytest.raises(PlanError, match="the chain is"):
        evaluate(choice, choice.chain.blocks[::-1], provider.on)


def interleaved(chunks: int, m: int = 4, pp: int = 2, layers: int = 8, memory: int = 0):
    """`layers` equal blocks in pp x chunks parts; sends are free unless `memory` bytes pass."""
    provider = Provider(cluster(pp), layers=1)
    one = provider.chains(1, 1)[0].blocks[1]
    blocks = [replace(one, name=f"b{i}", boundary_bytes=memory) for i in range(layers)]
    size = layers // (pp * chunks)
    names = [b.name for b in blocks]
    parts = tuple(StagePlan(tuple(names[i : i + size])) for i in range(0, layers, size))
    schedule = "interleaved" if chunks > 1 else "1f1b"
    setting = Setting(provider.on, Mesh(pp, 1, 1), 1, m, schedule, chunks=chunks)
    return evaluate_setting(setting, parts, blocks)


def test_chunks_trade_bubble_for_activations():
    plain, chunked = interleaved(1), interleaved(2)
    assert chunked.time_breakdown["bubble"] == pytest.approx(plain.time_breakdown["bubble"] / 2)
    assert chunked.step_seconds < plain.step_seconds
    # Of 2 stages the first holds 2 micro-batches of its 4 blocks, or 5 halves of them.
    one, two = plain.memory_per_stage[0].activations, chunked.memory_per_stage[0].activations
    assert two == pytest.approx(one * 5 / 4)
    assert chunked.stage_forward == pytest.approx(plain.stage_forward)


def test_chunks_send_more_often():
    plain, chunked = interleaved(1, memory=10**6), interleaved(4, memory=10**6)
    assert chunked.time_breakdown["pp_comm"] > 3 * plain.time_breakdown["pp_comm"] > 0


def test_parts_must_be_as_many_as_stages_and_chunks():
    with pytest.raises(PlanError, match="pp x chunks parts"):
        interleaved(3, layers=8)
