"""Schedules: order of actions, what is in flight, and when things happen."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from autopar.cost.pipeline import Action, actions, in_flight, makespan, simulate, step_seconds
from autopar.errors import UsageError
from autopar.interleaving import refused, round_size

SCHEDULES = st.sampled_from(["gpipe", "1f1b"])


def test_gpipe_and_1f1b_as_text():
    assert " ".join(map(str, actions("gpipe", 2, 3)[0])) == "F0 F1 F2 B0 B1 B2"
    first, last = actions("1f1b", 2, 3)
    assert " ".join(map(str, first)) == "F0 F1 B0 F2 B1 B2"
    assert " ".join(map(str, last)) == "F0 B0 F1 B1 F2 B2"


@given(schedule=SCHEDULES, stages=st.integers(1, 6), microbatches=st.integers(1, 12))
def test_every_microbatch_goes_forward_then_backward_once(schedule, stages, microbatches):
    for stage, order in enumerate(actions(schedule, stages, microbatches)):
        assert sorted(str(a) for a in order) == sorted(
            f"{kind}{i}" for kind in "FB" for i in range(microbatches)
        )
        for i in range(microbatches):
            kinds = [a.kind for a in order if a.microbatch == i]
            assert kinds == ["F", "B"]
        expected = min(microbatches, stages - stage)
        if schedule == "gpipe" and stages > 1:
            expected = microbatches
        assert in_flight(order) == expected


@given(
    schedule=SCHEDULES,
    stages=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    forward=st.floats(0.1, 5),
    backward=st.floats(0.1, 5),
)
def test_even_stages_take_the_closed_form(schedule, stages, microbatches, forward, backward):
    events = simulate([forward] * stages, [backward] * stages, microbatches, schedule)
    closed = (microbatches + stages - 1) * (forward + backward)
    assert makespan(events) == pytest.approx(closed, rel=1e-9)


@settings(max_examples=200)
@given(
    schedule=SCHEDULES,
    times=st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.1, 5)), min_size=1, max_size=5),
    microbatches=st.integers(1, 10),
    send=st.floats(0, 1),
)
def test_events_respect_order_and_dependencies(schedule, times, microbatches, send):
    forward, backward = [f for f, _ in times], [b for _, b in times]
    events = simulate(forward, backward, microbatches, schedule, send)
    stages = len(times)
    assert len(events) == 2 * stages * microbatches
    at = {(e.stage, e.kind, e.microbatch): e for e in events}
    for (stage, kind, i), event in at.items():
        if kind == "F" and stage:
            assert event.start >= at[stage - 1, "F", i].end + send - 1e-9
        if kind == "B" and stage < stages - 1:
            assert event.start >= at[stage + 1, "B", i].end + send - 1e-9
        if kind == "B":
            assert event.start >= at[stage, "F", i].end - 1e-9
    for stage in range(stages):
        mine = sorted((e for e in events if e.stage == stage), key=lambda e: e.start)
        for one, two in zip(mine, mine[1:], strict=False):
            assert two.start >= one.end - 1e-9
    slowest = microbatches * max(f + b for f, b in times)
    assert makespan(events) >= slowest - 1e-9


@given(
    schedule=SCHEDULES,
    forward=st.lists(st.floats(0.1, 5), min_size=1, max_size=6),
    ratio=st.floats(1, 3),
    extra=st.integers(0, 8),
)
def test_closed_form_is_an_upper_bound_when_backward_follows_forward(
    schedule, forward, ratio, extra
):
    """Uneven stages, the same backward to forward ratio: GPipe takes it exactly, 1F1B no longer."""
    backward = [f * ratio for f in forward]
    microbatches = len(forward) + extra
    total = [f + b for f, b in zip(forward, backward, strict=True)]
    closed = sum(total) + (microbatches - 1) * max(total)
    seen = makespan(simulate(forward, backward, microbatches, schedule))
    assert microbatches * max(total) * (1 - 1e-9) <= seen <= closed * (1 + 1e-9)
    if schedule == "gpipe":
        assert seen == pytest.approx(closed, rel=1e-9)


def test_an_unknown_schedule_is_named():
    with pytest.raises(UsageError, match="unknown schedule 'zb'"):
        actions("zb", 2, 2)


def test_interleaved_as_text():
    first, last = actions("interleaved", 2, 2, 2)
    assert " ".join(map(str, first)) == "F0 F1 F0.1 F1.1 B0.1 B1.1 B0 B1"
    assert " ".join(map(str, last)) == "F0 F1 F0.1 B0.1 F1.1 B1.1 B0 B1"


@given(
    stages=st.integers(2, 5), groups=st.integers(1, 3), chunks=st.integers(2, 4), rest=st.booleans()
)
def test_interleaved_runs_every_chunk_forward_then_backward_once(stages, groups, chunks, rest):
    microbatches = stages * groups + (1 if rest else 0)
    for stage, order in enumerate(actions("interleaved", stages, microbatches, chunks)):
        seen = [(a.microbatch, a.chunk) for a in order if a.kind == "F"]
        assert sorted(seen) == [(i, c) for i in range(microbatches) for c in range(chunks)]
        for unit in seen:
            assert [a.kind for a in order if (a.microbatch, a.chunk) == unit] == ["F", "B"]
        # Narayanan et al. 2021: a stage warms up with 2 (p - i - 1) + (v - 1) p + 1 chunks, p the
        # micro-batches of a round; torch's rounds are larger where they don't divide.
        size = round_size(stages, microbatches)
        assert size == stages or rest
        ahead = 2 * (stages - stage - 1) + (chunks - 1) * size + 1
        assert in_flight(order) == min(microbatches * chunks, ahead)


@given(
    stages=st.integers(2, 5),
    groups=st.integers(1, 3),
    chunks=st.integers(2, 4),
    forward=st.floats(0.1, 5),
    backward=st.floats(0.1, 5),
)
def test_chunks_shrink_the_bubble_by_their_number(stages, groups, chunks, forward, backward):
    microbatches = stages * groups
    parts = stages * chunks
    events = simulate(
        [forward / chunks] * parts,
        [backward / chunks] * parts,
        microbatches,
        "interleaved",
        chunks=chunks,
    )
    closed = (microbatches + (stages - 1) / chunks) * (forward + backward)
    assert makespan(events) == pytest.approx(closed, rel=1e-9)


def test_zero_bubble_as_text():
    first, last = actions("zero-bubble", 2, 2, 2)
    assert " ".join(map(str, first)) == "F0 F1 F0.1 F1.1 I0.1 W0.1 I1.1 W1.1 I0 W0 I1 W1"
    assert " ".join(map(str, last)) == "F0 F1 F0.1 I0.1 F1.1 I1.1 W0.1 I0 W1.1 I1 W0 W1"


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4])
def test_zero_bubble_is_the_order_of_torch(stages, chunks):
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    for microbatches in (n for n in range(1, 26) if not refused(stages, n)):
        # Only the numbers that the order is made from: no process group is needed for it.
        torchs = object.__new__(ScheduleInterleavedZeroBubble)
        torchs.pp_group_size, torchs.n_local_stages = stages, chunks
        torchs._n_microbatches = microbatches
        torchs.microbatches_per_round = microbatches // max(1, microbatches // stages)
        for rank, order in enumerate(actions("zero-bubble", stages, microbatches, chunks)):
            expected = [
                Action(kinds[a.computation_type.name], a.microbatch_index, a.stage_index // stages)
                for a in torchs._calculate_single_rank_operations(rank)
                if a is not None
            ]
            assert order == expected


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_zbv_is_the_order_of_torch(stages):
    kinds = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    for microbatches in range(1, 26):
        torchs = object.__new__(ScheduleZBVZeroBubble)
        torchs.pp_group_size, torchs.num_stages = stages, 2 * stages
        torchs._n_microbatches = microbatches
        for rank, order in enumerate(actions("zbv", stages, microbatches, 2)):
            expected = [
                Action(kinds[a.computation_type.name], a.microbatch_index, a.stage_index != rank)
                for a in torchs._calculate_single_rank_operations(rank)
                if a is not None
            ]
            assert order == expected


def test_zbv_as_text():
    first, last = actions("zbv", 2, 3, 2)
    assert " ".join(map(str, first)) == (
        "F0 F1 F2 F0.1 I0.1 W0.1 F1.1 I1.1 W1.1 I0 W0 F2.1 I2.1 W2.1 I1 W1 I2 W2"
    )
    assert " ".join(map(str, last)) == (
        "F0 F0.1 F1 F1.1 I0.1 W0.1 F2 I0 W0 F2.1 I1.1 W1.1 I1 I2.1 I2 W1 W2.1 W2"
    )


@given(stages=st.integers(2, 6), more=st.integers(0, 9), forward=st.floats(0.1, 5))
def test_a_v_of_equal_halves_idles_while_it_begins_and_ends_alone(stages, more, forward):
    microbatches, parts = 2 * stages + more, 2 * stages
    each = [forward] * parts
    took = step_seconds(each, [2 * forward] * parts, microbatches, "zbv", 2, each)
    assert took == pytest.approx((6 * microbatches + stages - 1) * forward, rel=1e-9)


@given(
    stages=st.integers(2, 5),
    groups=st.integers(1, 4),
    chunks=st.integers(2, 4),
    forward=st.floats(0.1, 5),
)
def test_equal_halves_leave_a_third_of_the_bubble(stages, groups, chunks, forward):
    """Where a forward and both halves take as long: (p - 1) / v forwards instead of three times as
    much."""
    microbatches, parts = stages * groups, stages * chunks
    each = [forward / chunks] * parts
    events = simulate(
        each, [2 * t for t in each], microbatches, "zero-bubble", chunks=chunks, weights=each
    )
    closed = (3 * microbatches + (stages - 1) / chunks) * forward
    assert makespan(events) == pytest.approx(closed, rel=1e-9)
    at = {(e.stage, e.chunk, e.kind, e.microbatch): e for e in events}
    assert len(at) == 3 * parts * microbatches
    for (stage, chunk, kind, i), event in at.items():
        if kind == "W":
            assert event.start >= at[stage, chunk, "I", i].end - 1e-9
        if kind == "I" and (stage, chunk) != (stages - 1, chunks - 1):
            behind = (stage + 1, chunk) if stage + 1 < stages else (0, chunk + 1)
            assert event.start >= at[*behind, "I", i].end - 1e-9


def test_chunks_need_the_interleaved_schedule_and_a_pipeline():
    with pytest.raises(UsageError, match="1f1b has 1 chunk, several have interleaved"):
        actions("1f1b", 2, 2, 2)
    with pytest.raises(UsageError, match="nothing to interleave with"):
        actions("interleaved", 1, 2, 2)
