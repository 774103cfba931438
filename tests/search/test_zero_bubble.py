"""Zero-bubble pipelines against enumeration by another route: the evaluator alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from autopar.block_cost import with_last_holders
from autopar.cost.pipeline import actions
from autopar.cost.setting import Setting
from autopar.errors import UsageError
from autopar.interleaving import rank_of, refused
from autopar.mesh import Mesh
from autopar.search.best_first import TIE
from autopar.search.bounds import bound, cut_seconds
from autopar.search.chain import Chain
from autopar.search.enumerate import legal_settings, search
from autopar.search.options import SearchOptions, parse_pins
from autopar.search.zero_bubble import least_peak, solve
from autopar.search.zero_bubble.phases import half_phases
from tests.search import synthetic
from tests.search.test_enumerate import try_everything
from tests.search.test_interleaved import evaluated, every_size
from tests.search.test_stages import NUMBERS, block, cluster, ties


def divided(found, part: float):
    """A block with what a divided backward asks for: `part` of its backward is for weights."""
    return replace(
        found,
        backward_weights=part * found.backward_compute,
        delayed_bytes=found.saved_bytes // 3,
        divided_transient_bytes=found.saved_bytes // 3 + found.transient_bytes,
        loose_bytes=found.saved_bytes // 5,
    )


def brute_force(blocks, setting, limit):
    """Seconds of the best of all cuts that fits."""
    best = None
    pp = setting.mesh.pp
    for sizes in every_size(len(blocks), pp * setting.chunks):
        part_of = [part for part, size in enumerate(sizes) for _ in range(size)]
        holders = {
            (t.group, rank_of(setting.schedule, p, pp), p)
            for p, b in zip(part_of, blocks, strict=True)
            for t in b.tied
        }
        if len({place[:2] for place in holders}) < len(holders):
            continue  # two parts of one rank would each hold a copy
        if len({p for p, b in zip(part_of, blocks, strict=True) if b.parameters}) < len(sizes):
            continue  # a part without parameters
        seen = evaluated(blocks, setting, sizes, {})
        if seen.peak_bytes <= limit and (best is None or seen.step_seconds < best):
            best = seen.step_seconds
    return best


@settings(max_examples=250, deadline=None, phases=[Phase.generate])
@given(
    rows=st.lists(NUMBERS, min_size=4, max_size=8),
    pp=st.integers(2, 3),
    kind=st.sampled_from([("zero-bubble", 1), ("zero-bubble", 2), ("zero-bubble", 3), ("zbv", 2)]),
    microbatches=st.integers(1, 13),
    dp=st.integers(1, 2),
    zero=st.integers(0, 1),
    fraction=st.floats(0.5, 1.1),
    tied=st.sampled_from([0, 30]),
    inner=st.sampled_from([(), (1, 2), (0, 1), (2, 3, 4)]),
    part=st.floats(0.0, 1.0),
    precision=st.sampled_from(["fp32", "bf16-mixed", "bf16"]),
    slowdown=st.sampled_from([0.0, 0.4]),
)
def test_equals_brute_force(
    rows, pp, kind, microbatches, dp, zero, fraction, tied, inner, part, precision, slowdown
):
    schedule, chunks = kind
    assume(pp * chunks <= len(rows) and not refused(pp, microbatches, schedule))
    blocks = with_last_holders(
        [
            divided(block(i, n, ties(i, len(rows) - 1, tied, inner)), part)
            for i, n in enumerate(rows)
        ]
    )
    mesh = Mesh(pp, dp, 1)
    on = cluster(mesh.size)
    on = replace(on, device=replace(on.device, divided_slowdown=slowdown))
    setting = Setting(
        on,
        mesh,
        1,
        microbatches,
        schedule,
        zero if dp > 1 else 0,
        precision,
        chunks=chunks,
    )
    chain = Chain(blocks)
    free = solve(chain, setting, np.inf)
    if free is None:
        assert brute_force(blocks, setting, 2**62) is None
        return
    limit = int(max(free.peaks) * fraction)
    expected = brute_force(blocks, setting, limit)
    found = solve(chain, setting, limit)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert found.objective == pytest.approx(expected, rel=1e-9)
    assert found.bound <= found.objective
    seen = evaluated(blocks, setting, np.diff(found.cuts).tolist(), {})
    assert seen.step_seconds == pytest.approx(found.objective, rel=1e-9)
    assert tuple(m.total for m in seen.memory_per_stage) == found.peaks
    assert sum(seen.time_breakdown.values()) == pytest.approx(seen.step_seconds, rel=1e-9)
    for kind in ({}, {"sums": True}, {"exact": True}):
        assert cut_seconds(chain, setting, limit, **kind) <= found.objective * (1 + 1e-9)
    least = bound(chain, setting)
    assert least.seconds <= found.objective * (1 + 1e-9)
    assert least.peak <= max(found.peaks)
    smallest = least_peak(chain, setting, "none", None)
    assert smallest is not None and smallest <= max(found.peaks)
    assert solve(chain, setting, smallest) is not None
    assert solve(chain, setting, smallest - 1) is None
    assert solve(chain, setting, limit, cutoff=found.objective) is None
    assert solve(chain, setting, limit, recompute="full") is None


def halves(rank, setting):
    """(chunk, kind, first of its chunk) of every half, and [3 x chunks] what is alive before its
    backward, between the halves, and has gradients."""
    chunks = setting.chunks
    live, delayed, done = (np.zeros(chunks, np.int64) for _ in range(3))
    for action in actions(setting.schedule, setting.mesh.pp, setting.microbatches, chunks)[rank]:
        c = action.chunk
        if action.kind == "F":
            live[c] += 1
            continue
        first = bool(done[c] == 0)
        yield (c, action.kind, first), np.concatenate([live - delayed, delayed, done > 0])
        if action.kind == "I":
            delayed[c] += 1
        else:
            live[c], delayed[c], done[c] = live[c] - 1, delayed[c] - 1, done[c] + 1


@pytest.mark.parametrize(
    ("schedule", "pp", "microbatches", "chunks"),
    [
        *(("zero-bubble", *case) for case in ((2, 6, 2), (3, 12, 3), (4, 20, 2), (4, 24, 1))),
        *(("zbv", *case, 2) for case in ((2, 6), (3, 20), (4, 5), (4, 41))),
    ],
)
def test_no_half_is_fuller_than_those_that_are_looked_at(schedule, pp, microbatches, chunks):
    """With whatever bytes a micro-batch has in each chunk."""
    mesh = Mesh(pp)
    setting = Setting(cluster(pp), mesh, 1, microbatches, schedule, chunks=chunks)
    random = np.random.default_rng(0)
    weights = random.exponential(size=(200, 3 * chunks)) * random.integers(0, 2, (200, 3 * chunks))
    for rank, kept in enumerate(half_phases(setting)):
        rows = np.concatenate([kept.live - kept.delayed, kept.delayed, kept.before], axis=1)
        bytes_of: dict[tuple[int, str, bool], list[np.ndarray]] = {}
        for sort, row in halves(rank, setting):
            bytes_of.setdefault(sort, []).append(weights @ row)
        for (chunk, kind, first), found in bytes_of.items():
            mine = (kept.chunk == chunk) & (kept.second == (kind == "W")) & (kept.first == first)
            expected = np.max(found, axis=0)
            assert (weights @ rows[mine].T).max(axis=1) == pytest.approx(expected)


def pinned(text: str, **more):
    options = SearchOptions(global_batch=32, pins=parse_pins(text), **more)
    provider = synthetic.Provider(synthetic.cluster(8), layers=10)
    return search(provider, provider.on, options)


def test_a_pin_is_kept_and_what_it_leaves_open_is_chosen():
    found = pinned("schedule=zero-bubble").choice
    assert found is not None and found.schedule == "zero-bubble"
    assert found.zero <= 1 and found.recompute_label == "none"
    exact = pinned(f"schedule=zero-bubble,chunks={found.chunks},pp={found.mesh.pp}").choice
    assert exact is not None
    assert exact.step_seconds == pytest.approx(found.step_seconds, rel=1e-9)


class Divided(synthetic.Provider):
    """Whose backwards are divided: a `part` of each is for gradients of weights."""

    part = 0.5

    def blocks(self, tp, microbatch, *, split):
        return tuple(divided(b, self.part) for b in super().blocks(tp, microbatch, split=split))


@settings(max_examples=15, deadline=None)
@given(
    ranks=st.sampled_from([4, 6, 8]),
    layers=st.integers(2, 5),
    batch=st.sampled_from([12, 24]),
    pins=st.sampled_from(["zero=0", "zero=1", "zero=0,tp=1", "zero=1,pp=2", "zero=0,pp=2,tp=1"]),
    part=st.sampled_from([0.0, 0.4, 0.6]),
    tied=st.booleans(),
    gib=st.floats(0.5, 6.0),
)
def test_without_a_pin_the_search_finds_what_trying_every_schedule_finds(
    ranks, layers, batch, pins, part, tied, gib
):
    provider = Divided(synthetic.cluster(ranks), layers=layers, tied=tied, sets=True)
    provider.part = part
    options = SearchOptions(batch, pins=parse_pins(pins), memory_limit=int(gib * 2**30))
    expected = try_everything(provider, options)
    result = search(provider, provider.on, options, explain=False)
    if expected is None:
        assert result.choice is None
        return
    assert result.gap == 0.0
    found, _ = legal_settings(provider, provider.on, options)
    choice = result.choice
    here = [s for s in found if s.mesh.shape == choice.mesh.shape]
    if (choice.schedule, choice.chunks) in {(s.schedule, s.chunks) for s in here}:
        assert result.step_seconds == pytest.approx(expected, rel=2 * TIE)
    else:  # a number of chunks that is tried on the plan's mesh alone
        assert result.step_seconds < expected


def chosen(part: float, gib: float):
    """The plan of a few micro-batches over a pipeline, and what is beside it."""
    provider = Divided(synthetic.cluster(4), layers=14)
    provider.part = part
    pins = parse_pins("pp=4,microbatch=1")
    options = SearchOptions(8, pins=pins, memory_limit=int(gib * 2**30))
    return search(provider, provider.on, options)


def test_is_chosen_without_a_pin_where_it_is_faster_and_fits():
    found = chosen(0.5, 40.0)
    assert found.choice is not None and found.choice.schedule == "zero-bubble"
    assert found.gap == 0.0
    beside = {n.change: n.choice for n in found.neighbours}
    for schedule in ("1f1b", "interleaved"):
        other = beside[f"schedule {schedule}"]
        assert other is not None and other.schedule == schedule
        assert other.step_seconds > found.choice.step_seconds
    # What divided backwards rule out is shown with whole ones.
    again = beside["full recomputation"]
    assert again is not None and again.schedule == "interleaved"


def test_is_not_chosen_where_nothing_can_wait_or_too_little_fits():
    plain, tight = chosen(0.0, 40.0), chosen(0.5, 2.0)
    for found in (plain, tight):
        assert found.choice is not None and found.choice.schedule != "zero-bubble"


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ("schedule=zero-bubble,zero=3", "ZeRO-3"),
        ("schedule=zero-bubble,zero=2", "ZeRO-2"),
        ("schedule=zero-bubble,recompute=full", "recomputed block would run again"),
        ("schedule=zbv,chunks=3", "zbv has 2 chunks"),
        ("schedule=zbv,cuts=layers.0", "cuts, but without chunks"),
        ("schedule=interleaved,chunks=1", "interleaved has 2 chunks or more"),
        ("schedule=zero-bubble,pp=1", "schedule=zero-bubble with pp=1"),
    ],
)
def test_what_can_not_run_is_refused_by_name(pins, message):
    with pytest.raises(UsageError, match=message):
        pinned(pins)
