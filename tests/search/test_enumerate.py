"""The outer search: equal to trying everything, honest about time, true to its pins."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.evaluate import evaluate
from autopar.errors import PassError, UsageError
from autopar.search import best_first, stages
from autopar.search.best_first import TIE, solve_stages
from autopar.search.bounds import bound
from autopar.search.chain import Chain
from autopar.search.enumerate import legal_settings, search
from autopar.search.options import SearchOptions, parse_pins
from autopar.search.reshard_pin import kept_gathered
from autopar.search.result import SearchResult
from tests.search.synthetic import Provider, cluster

GIB = 2**30


def try_everything(provider: Provider, options: SearchOptions) -> float | None:
    """The best step over all configurations, none skipped."""
    limit = options.limit(provider.on)
    best = None
    for setting in legal_settings(provider, provider.on, options)[0]:
        for known in provider.alternatives(setting.mesh.tp, setting.microbatch):
            cost = known.price()
            kept = kept_gathered(options.pins, provider.block_names)
            found = solve_stages(Chain(cost.blocks), setting, limit, "auto", None, kept=kept)
            if found is not None:
                least = bound(Chain(cost.blocks), setting, keeps_within=limit)
                assert least.seconds <= found.objective * (1 + 1e-12)
                assert bound(Chain(cost.blocks), setting).peak <= max(found.peaks)
                sketch = bound(Chain(known.least.blocks), setting, sums=True, keeps_within=limit)
                assert sketch.seconds <= found.objective * (1 + 1e-12)
                if best is None or found.objective < best:
                    best = found.objective
    return best


@settings(max_examples=25, deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 4, 8, 12]),
    layers=st.integers(1, 5),
    batch=st.sampled_from([4, 8, 24]),
    width=st.sampled_from([512, 2048]),
    precision=st.sampled_from(["fp32", "bf16-mixed", "bf16"]),
    gib=st.floats(0.3, 6.0),
    tied=st.booleans(),
    sets=st.booleans(),
    bare=st.booleans(),
)
def test_finds_what_trying_everything_finds(
    ranks, layers, batch, width, precision, gib, tied, sets, bare
):
    provider = Provider(
        cluster(ranks), layers=layers, width=width, tied=tied, sets=sets, bare_head=bare
    )
    options = SearchOptions(batch, precision=precision, memory_limit=int(gib * GIB))
    result = search(provider, provider.on, options)
    expected = try_everything(provider, options)
    if expected is None:
        assert result.status == "infeasible" and result.choice is None
        return
    assert result.status == "optimal"
    assert result.step_seconds == pytest.approx(expected, rel=2 * TIE)
    assert result.bound_step_seconds <= result.step_seconds * (1 + TIE) and result.gap <= TIE
    assert max(m["total"] for m in result.memory_per_stage) <= options.limit(provider.on)
    for recipe in result.recipes:
        if recipe.fits:
            assert recipe.choice.step_seconds >= result.step_seconds * (1 - TIE)


def test_blocks_are_recomputed_in_part_where_that_is_cheaper():
    provider = Provider(cluster(2), width=2048, sets=True)
    pins, limit = "pp=1,microbatch=4,zero=3", 5 * GIB

    def step(more: str) -> SearchResult:
        options = SearchOptions(32, memory_limit=limit, pins=parse_pins(f"{pins}{more}"))
        return search(provider, provider.on, options)

    free, part, whole = step(""), step(",recompute=selective"), step(",recompute=full")
    assert step(",recompute=none").status == "infeasible"
    assert not any(s.recompute for s in part.choice.stages)
    assert "in part" in part.choice.recompute_label
    assert set(part.choice.reruns["layer"]) <= {"set 1", "set 2"}
    assert free.step_seconds <= part.step_seconds < whole.step_seconds


def test_is_deterministic_and_counts_what_it_did():
    first, second = (
        search(Provider(cluster(8)), cluster(8), SearchOptions(32, memory_limit=2 * GIB))
        for _ in range(2)
    )
    assert first.choice == second.choice
    assert first.alternatives == second.alternatives
    assert first.configurations == second.configurations
    assert 0 <= first.pruned < first.shapes
    document = first.search_dict()
    assert {"seconds", "shapes", "pruned", "bound_step_seconds", "gap"} <= set(document)
    assert sum(first.time_breakdown.values()) == pytest.approx(first.step_seconds, rel=1e-12)


def test_alternatives_are_other_shapes_in_order_with_reasons():
    result = search(Provider(cluster(8)), cluster(8), SearchOptions(32, memory_limit=4 * GIB))
    times = [c.step_seconds for c in result.alternatives]
    assert times == sorted(times) and times[0] >= result.step_seconds
    shapes = {c.mesh for c in result.alternatives}
    assert len(shapes) == len(result.alternatives) == 3 and result.choice.mesh not in shapes
    assert all("more" in c.why for c in result.alternatives)


@pytest.mark.parametrize(
    "pins",
    [
        "tp=2,pp=2,dp=2",
        "zero=3,dp=4",
        "microbatch=2",
        "microbatches=8",
        "schedule=gpipe,pp=4",
        "recompute=full",
        "recompute=none",
        "recompute=selective",
        "boundary=S(1),tp=4",
        "cuts=layers.3",
        "schedule=interleaved,pp=2",
        "chunks=3,tp=2",
        "chunks=2,pp=2,recompute=full,zero=2,dp=2",
        "chunks=2,cuts=layers.0+layers.2+layers.4",
        "tp=2,pp=2,dp=2,zero=1,microbatch=1,schedule=1f1b,recompute=full,boundary=R",
    ],
)
def test_pins_are_kept(pins):
    provider = Provider(cluster(8))
    choice = search(provider, provider.on, SearchOptions(32, pins=parse_pins(pins))).choice
    wanted = parse_pins(pins)
    assert choice is not None
    for axis in ("tp", "pp", "dp"):
        assert getattr(wanted, axis) in (None, choice.mesh.degree(axis))
    for name in ("zero", "microbatch", "microbatches", "schedule", "chunks", "boundary"):
        assert getattr(wanted, name) in (None, getattr(choice, name))
    assert wanted.recompute in (None, "selective", choice.recompute_label)
    if wanted.cuts:
        assert [s.blocks[0] for s in choice.stages] == ["embed", *wanted.cuts]


def test_1f1b_needs_as_many_microbatches_as_stages():
    provider = Provider(cluster(4))
    pins = parse_pins("pp=4,chunks=1,recompute=full")
    gpipe = search(provider, provider.on, SearchOptions(2, pins=pins))
    assert gpipe.choice.schedule == "gpipe" and gpipe.choice.microbatches <= 2
    with pytest.raises(UsageError, match="at least as many micro-batches as stages"):
        search(provider, provider.on, SearchOptions(2, pins=parse_pins("pp=4,schedule=1f1b")))


def test_a_batch_that_does_not_divide_is_left_out_with_the_reason():
    provider = Provider(cluster(8), heads=2)
    result = search(provider, provider.on, SearchOptions(3))
    assert result.choice.mesh.dp == 1
    assert any("global batch 3 does not divide" in note for note in result.notes)


@pytest.mark.parametrize("chunks", [1, 2])
def test_every_stage_has_a_parameter(chunks):
    provider = Provider(cluster(2), layers=2, width=512, bare_head=True)
    pins = f"pp=2,microbatch=1,chunks={chunks}"
    options = SearchOptions(8, memory_limit=40 * GIB, pins=parse_pins(pins))
    if chunks == 2:
        with pytest.raises(UsageError, match="more stages than the 3 of 4 blocks with parameters"):
            search(provider, provider.on, options)
        return
    # The head is so slow that it would be a stage of its own.
    result = search(provider, provider.on, options)
    assert all(s.blocks != ("head",) for s in result.choice.stages)
    assert any("no stage holds only head" in note for note in result.notes)
    other = Provider(cluster(2), layers=2, width=512)
    free = search(other, other.on, options)
    assert free.choice.stages[1].blocks == ("head",)


def test_given_cuts_that_leave_a_stage_without_parameters_are_refused():
    provider = Provider(cluster(2), layers=2, bare_head=True)
    options = SearchOptions(8, memory_limit=40 * GIB, pins=parse_pins("cuts=head"))
    with pytest.raises(UsageError, match="a stage of the given cuts holds no parameter"):
        search(provider, provider.on, options)


def test_a_fixed_captured_batch_is_respected():
    provider = Provider(cluster(4), fixed_batch=6)
    result = search(provider, provider.on, SearchOptions(720))
    assert result.choice.microbatch == 6
    with pytest.raises(UsageError, match="another, fixed batch"):
        search(provider, provider.on, SearchOptions(720, pins=parse_pins("microbatch=4")))


def test_an_unknown_boundary_names_the_known_ones():
    provider = Provider(cluster(4))
    with pytest.raises(UsageError, match=r"choose one of R, S\(1\)"):
        search(provider, provider.on, SearchOptions(8, pins=parse_pins("boundary=S(2),tp=2")))


def test_ties_go_to_the_simpler_plan():
    provider = Provider(cluster(1))
    choice = search(provider, provider.on, SearchOptions(4)).choice
    assert choice.zero == 0 and choice.boundary == "R" and choice.recompute_label == "none"


def test_out_of_time_gives_a_plan_with_its_gap_not_a_false_proof():
    provider = Provider(cluster(8), layers=30, width=4096)
    options = SearchOptions(64, memory_limit=30 * GIB, time_limit=0.0)
    hasty = search(provider, provider.on, options)
    proven = search(provider, provider.on, SearchOptions(64, memory_limit=30 * GIB))
    assert hasty.bound_step_seconds <= proven.step_seconds <= hasty.step_seconds * (1 + TIE)
    assert hasty.status == ("optimal" if hasty.gap <= TIE else "feasible")
    for recipe in hasty.recipes:
        if recipe.fits:
            assert recipe.choice.step_seconds >= hasty.step_seconds * (1 - TIE)


@pytest.mark.parametrize("after", [1, 3])
def test_an_interrupt_gives_the_best_plan_so_far_with_its_gap(monkeypatch, after):
    provider = Provider(cluster(8), layers=30, width=4096)
    proven = search(provider, provider.on, SearchOptions(64, memory_limit=16 * GIB))
    left = None  # solves until the interrupt, once there is a plan

    def interrupted(*args, **options):
        nonlocal left
        if left is not None:
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        found = solve(*args, **options)
        if found is not None and left is None:
            left = after
        return found

    solve = best_first.solve_stages
    monkeypatch.setattr(best_first, "solve_stages", interrupted)
    found = search(provider, provider.on, SearchOptions(64, memory_limit=16 * GIB))
    assert left is not None and left <= 0 and any("interrupted" in note for note in found.notes)
    assert found.bound_step_seconds <= proven.step_seconds <= found.step_seconds * (1 + TIE)
    assert found.status == ("optimal" if found.gap <= TIE else "feasible")
    assert not found.alternatives and not found.neighbours


def test_an_interrupt_before_any_plan_returns_the_best_recipe(monkeypatch):
    provider = Provider(cluster(8))
    free = search(provider, provider.on, SearchOptions(32))
    monkeypatch.setattr(stages, "solve", lambda *args, **options: exec("raise KeyboardInterrupt"))
    found = search(provider, provider.on, SearchOptions(32))
    assert found.choice is not None and found.status == "feasible"
    best = min(r.choice.step_seconds for r in free.recipes if r.fits)
    assert found.choice.step_seconds == pytest.approx(best)
    assert found.bound_step_seconds <= free.step_seconds * (1 + TIE)
    assert any("interrupted" in note for note in found.notes)


def test_an_interrupt_before_any_plan_ends_a_search_without_recipes(monkeypatch):
    """Pins, which recipes do not follow."""
    provider = Provider(cluster(8))
    monkeypatch.setattr(stages, "solve", lambda *args, **options: exec("raise KeyboardInterrupt"))
    pinned = SearchOptions(32, pins=parse_pins("tp=2,schedule=1f1b"))
    with pytest.raises(KeyboardInterrupt):
        search(provider, provider.on, pinned)


def test_asks_for_prices_only_where_the_bound_leaves_a_doubt():
    provider = Provider(cluster(64), layers=40, width=8192)
    result = search(provider, provider.on, SearchOptions(512))
    possible = {
        (s.mesh.tp, s.microbatch)
        for s in legal_settings(provider, provider.on, SearchOptions(512))[0]
    }
    assert result.status == "optimal"
    assert len(set(provider.asked)) == len(provider.asked) < len(possible)


def test_progress_is_reported():
    seen = []
    provider = Provider(cluster(8))
    search(provider, provider.on, SearchOptions(32), seen.append)
    assert seen and seen[0].explored == 1 and seen[0].best_seconds is None
    assert max(state.pruned for state in seen) > 0


def test_an_objective_that_is_not_the_cost_is_refused(monkeypatch):
    true_solve = stages.solve

    def wrong(*args, **kwargs):
        found = true_solve(*args, **kwargs)
        if found is None:
            return None
        return stages.StageSolution(
            found.objective * 0.985, found.bound, found.cuts, found.recompute, found.peaks
        )

    monkeypatch.setattr(stages, "solve", wrong)
    provider = Provider(cluster(8))
    with pytest.raises(PassError, match="a fault of autopar"):
        search(provider, provider.on, SearchOptions(32))


def test_the_evaluation_is_of_the_chosen_plan():
    provider = Provider(cluster(8))
    result = search(provider, provider.on, SearchOptions(32, memory_limit=2 * GIB))
    again = evaluate(result.choice, result.choice.chain.blocks, provider.on)
    assert again == result.evaluation


def test_no_neighbour_is_faster_than_the_plan_told_of_its_mesh():
    """What other meshes take at least is told once, whether it was solved as one or as a change."""
    provider = Provider(cluster(8), layers=12)
    found = search(provider, provider.on, SearchOptions(32))
    assert found.choice is not None
    told = {c.mesh.shape: c.step_seconds for c in found.alternatives}
    assert found.choice.mesh.shape not in told
    for near in found.neighbours:
        if near.choice is not None and near.choice.mesh.shape in told:
            assert told[near.choice.mesh.shape] <= near.choice.step_seconds * (1 + 1e-9)
    others = [n.choice for n in found.neighbours if n.choice is not None]
    slowest = max(told.values(), default=0.0)
    for choice in others:
        if choice.mesh.shape not in told and choice.mesh.shape != found.choice.mesh.shape:
            assert choice.step_seconds >= slowest * (1 - 1e-9)


def test_ctrl_c_while_progress_is_shown_returns_the_best_plan_so_far():
    provider = Provider(cluster(8), layers=12)
    seen = []

    def interrupt(state):
        if state.best_seconds is not None and not seen:
            seen.append(state)
            raise KeyboardInterrupt

    found = search(provider, provider.on, SearchOptions(32), progress=interrupt)
    assert seen
    assert found.choice is not None and found.bound_step_seconds is not None
    assert found.bound_step_seconds <= found.choice.step_seconds <= seen[0].best_seconds
    assert any("interrupted" in note for note in found.notes)


@pytest.mark.parametrize("pins", ["tp=8", "recompute=full", "schedule=gpipe,pp=4"])
def test_what_is_faster_than_a_pinned_plan_has_less_of_something(pins):
    provider = Provider(cluster(8))
    found = search(provider, provider.on, SearchOptions(16, pins=parse_pins(pins)))
    others = [
        *found.alternatives,
        *(score.choice for score in found.recipes if score.choice),
        *(near.choice for near in found.neighbours if near.choice),
    ]
    assert others
    for other in others:
        slower = other.step_seconds >= found.step_seconds
        assert not other.why or ("more" if slower else "less") in other.why, other.why
    if pins != "schedule=gpipe,pp=4":
        assert any("less" in other.why for other in others)
