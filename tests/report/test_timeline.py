from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.report.limits import limits
from autopar.report.text import schedule_name
from autopar.report.timeline import TimelineEvent, simulated, split_recompute, window
from tests.report import sample


def test_recomputation_is_cut_off_the_front_of_the_backward() -> None:
    forward, backward = (
        TimelineEvent(0, "forward", 0, 0.0, 1.0),
        TimelineEvent(0, "backward", 0, 1.0, 4.0),
    )
    assert split_recompute([forward, backward], [1.0]) == [
        forward,
        TimelineEvent(0, "recompute", 0, 1.0, 2.0),
        TimelineEvent(0, "backward", 0, 2.0, 4.0),
    ]
    assert split_recompute([forward, backward], []) == [forward, backward]


def test_a_plan_is_simulated_from_its_predictions() -> None:
    plan = sample.make_plan()
    events = simulated(plan)
    assert len(events) == 2 * 4 * 32 and {e.kind for e in events} == {"F", "B"}
    assert {e.kind for e in split_recompute(events, [])} == {"forward", "backward"}
    assert not simulated(replace(plan, predicted={}))


def test_own_recompute_events_stay() -> None:
    events = [TimelineEvent(0, "recompute", 0, 0.0, 1.0), TimelineEvent(0, "backward", 0, 1.0, 4.0)]
    assert split_recompute(events, [1.0]) == events


def test_all_of_a_short_step_is_shown() -> None:
    plan = sample.make_plan()
    shown = window(sample.timeline(plan), plan.microbatches)
    assert len(shown.events) == 3 * 4 * 32 and not shown.note
    assert not window([], 500).events


@pytest.mark.parametrize("stages", [1, 4, 16])
def test_a_long_step_is_shown_up_to_a_cut_without_holes(stages: int) -> None:
    plan = sample.make_plan(stages, 126, 256)
    events = sample.timeline(plan)
    shown = window(events, plan.microbatches)
    end = max(e.start for e in shown.events)
    # Nothing that begins before the last shown event is missing.
    assert {e for e in events if e.start <= end} == set(shown.events)
    assert "of 256" in shown.note and len(shown.events) < len(events) / 4


def test_chunks_are_told_apart_and_each_recomputes_its_own() -> None:
    plan = sample.make_plan()
    seconds = [{"forward": 1.0, "backward": 2.0, "recompute": 0.1 * i} for i in range(4)]
    plan = replace(
        plan,
        mesh=replace(plan.mesh, pp=2),
        schedule="interleaved",
        chunks=2,
        microbatches=4,
        predicted={"stage_seconds": seconds},
    )
    events = split_recompute(simulated(plan), [s["recompute"] for s in seconds], 2)
    # (m + (p - 1) / v) (F + B) with F + B = 2 x 3 seconds.
    assert max(e.end for e in events) == pytest.approx((4 + 1 / 2) * 6)
    assert {e.stage for e in events} == {0, 1} and {e.chunk for e in events} == {0, 1}
    for event in events:
        if event.kind == "recompute":
            stage = event.chunk * 2 + event.stage
            assert event.end - event.start == pytest.approx(0.1 * stage)


def test_halves_of_backwards_are_drawn_apart() -> None:
    plan = sample.make_plan()
    seconds = [{"forward": 1.0, "backward": 2.0, "recompute": 0.0, "weights": 1.0}] * 4
    plan = replace(
        plan,
        mesh=replace(plan.mesh, pp=2),
        schedule="zero-bubble",
        chunks=2,
        microbatches=4,
        predicted={**plan.predicted, "stage_seconds": seconds},
    )
    events = split_recompute(simulated(plan), [0.0] * 4, 2)
    kinds = ["forward", "input gradients", "weight gradients"]
    assert [sum(e.kind == k for e in events) for k in kinds] == [16, 16, 16]
    assert max(e.end for e in events) == 2 * 4 * 3 + 1  # busy all the time but for one forward
    text = " ".join(limits(plan))
    assert "idles (p-1)/(vm+p-1) = 11.1 %" in text
    assert "it would be (p-1)/(3vm+p-1) = 4.0 %" in text
    assert schedule_name(plan) == "zero-bubble with 2 chunks"
