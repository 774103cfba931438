"""Nothing fits: the smallest memory is exact, and every relaxation was solved."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.setting import Setting
from autopar.errors import UsageError
from autopar.mesh import Mesh
from autopar.search import columns, stages
from autopar.search.enumerate import search
from autopar.search.infeasible import explain, explain_infeasible, infeasible_error
from autopar.search.more_ranks import with_nodes
from autopar.search.options import SearchOptions, parse_pins
from autopar.search.remedies import Variant
from autopar.search.smallest_memory import least_peak
from tests.search.synthetic import Provider, cluster
from tests.search.test_stages import NUMBERS, SETS, block, brute_force
from tests.search.test_stages import cluster as unit_cluster

MIB = 2**20


def impossible(pins: str = "", **changes):
    provider = Provider(cluster(4))
    options = SearchOptions(16, memory_limit=150 * MIB, pins=parse_pins(pins), **changes)
    result = search(provider, provider.on, options)
    assert result.status == "infeasible" and result.choice is None and result.gap is None
    return provider, options, result


def factory(variant, on, /):
    scale = 1 if variant.precision == "bf16" else 2
    if variant.adapters:
        raise UsageError("adapters need PEFT", next_step="pip install autopar[lora]")
    return Provider(on, sequence=1024 * scale // variant.shorter)


def test_the_smallest_memory_works_and_one_byte_less_does_not():
    provider, options, result = impossible()
    found = explain_infeasible(result, provider, provider.on, options).infeasible
    enough = SearchOptions(16, memory_limit=found.smallest_bytes)
    assert search(provider, provider.on, enough).status == "optimal"
    too_little = SearchOptions(16, memory_limit=found.smallest_bytes - 1)
    assert search(provider, provider.on, too_little).status == "infeasible"


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(NUMBERS, min_size=3, max_size=5),
    pp=st.integers(1, 3),
    m=st.integers(1, 4),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    recompute=st.sampled_from(["auto", "selective", "none", "full"]),
    partial=st.lists(st.lists(SETS, max_size=2).map(tuple), min_size=5, max_size=5),
)
def test_least_peak_is_the_smallest_limit_with_a_solution(
    numbers, pp, m, schedule, recompute, partial
):
    blocks = [block(i, x, partial=partial[i]) for i, x in enumerate(numbers)]
    setting = Setting(unit_cluster(pp), Mesh(pp, 1, 1), 1, m, schedule)
    table = columns.build(blocks, setting)
    peak = least_peak(table, recompute)
    if peak is None:  # no cut leaves a parameter in every stage
        assert stages.solve(table, 2**60, recompute=recompute) is None
        return
    assert stages.solve(table, peak, recompute=recompute) is not None
    assert stages.solve(table, peak - 1, recompute=recompute) is None
    assert brute_force(blocks, setting, peak - 1, recompute) == math.inf


def test_relaxations_come_in_order_and_are_solved():
    provider, options, result = impossible("recompute=none,zero=0,microbatch=2")
    found = explain_infeasible(result, provider, provider.on, options, factory).infeasible
    names = [r.change for r in found.relaxations]
    assert names[0] == "precision bf16"
    order = [
        *("free microbatch=2", "global batch 8", "half the sequence"),
        *("recompute=full instead of none", "free zero=0", "optimizer adamw-8bit"),
    ]
    assert [n for n in names if n in order] == order
    assert any(r.fits for r in found.relaxations)
    for relaxation in found.relaxations:
        if relaxation.fits:
            assert relaxation.peak_bytes <= options.memory_limit and relaxation.step_seconds > 0
    text = explain(found)
    assert "nothing fits in 150.0 MiB per rank" in text and "not enough: " in text
    assert "not tried: LoRA" in text and "pip install autopar[lora]" in text


def test_offload_is_tried_where_the_host_is_known():
    provider, options, _ = impossible()
    on = cluster(4)
    known = replace(on.device, host_bytes_per_second=5e10, host_memory_bytes_per_second=5e10)
    on = replace(on, device=known)
    result = search(provider, on, options)
    names = [
        r.change for r in explain_infeasible(result, provider, on, options).infeasible.relaxations
    ]
    assert names[-1].startswith("offload (optimizer adamw-host")
    result = search(provider, cluster(4), options)
    found = explain_infeasible(result, provider, cluster(4), options).infeasible
    assert not any("offload" in r.change for r in found.relaxations)
    with pytest.raises(UsageError, match="host's memory is not known"):
        search(provider, cluster(4), replace(options, optimizer="adamw-host"))


def test_more_ranks_are_tried_on_a_larger_cluster():
    provider, options, result = impossible("recompute=full,zero=3")
    found = explain_infeasible(result, provider, provider.on, options, factory).infeasible
    assert {"2 x the ranks (8)", "4 x the ranks (16)"} <= {r.change for r in found.relaxations}


@pytest.mark.parametrize("fewest", [3, 4, 5, 7, 8])
def test_the_fewest_nodes_that_fit_are_found(fewest):
    """Of nodes of one rank, up to four times as many as were given."""
    on = cluster(2, per_node=1)
    pins = parse_pins("tp=1,pp=1,zero=3,recompute=full,microbatch=1")
    options = SearchOptions(840, pins=pins)

    def needs(nodes: int) -> int:
        larger = with_nodes(on, nodes)
        provider, small = factory(Variant("bf16-mixed"), larger), replace(options, memory_limit=MIB)
        found = explain_infeasible(search(provider, larger, small), provider, larger, small)
        return found.infeasible.smallest_bytes

    tight = replace(options, memory_limit=needs(fewest))
    assert needs(fewest - 1) > tight.memory_limit
    provider = factory(Variant("bf16-mixed"), on)
    result = search(provider, on, tight)
    found = explain_infeasible(result, provider, on, tight, factory).infeasible
    ranks = {}
    for tried in found.relaxations:
        if size := re.search(r"\((\d+)(?: ranks)?\)", tried.change):
            ranks[int(size[1])] = tried.fits
    assert min(n for n, fits in ranks.items() if fits) == fewest
    assert fewest == 3 or not ranks[fewest - 1]


def test_nothing_pinned_is_not_freed_at_once():
    provider, options, result = impossible()
    found = explain_infeasible(result, provider, provider.on, options, factory).infeasible
    assert not any("pins" in r.change for r in found.relaxations)


def test_what_the_program_forces_is_not_freed():
    forced = parse_pins("dp=1,microbatches=1")
    provider, options, result = impossible("dp=1,microbatches=1,zero=0", forced=forced)
    found = explain_infeasible(result, provider, provider.on, options, factory).infeasible
    names = [r.change for r in found.relaxations]
    assert "free zero=0" in names
    assert not any("dp=1" in n or "microbatches=1" in n for n in names)
    described = [r.plan for r in found.relaxations if r.fits]
    assert all("dp1" in text and "1 micro-batch of" in text for text in described)


def test_without_a_factory_only_decisions_are_freed():
    provider, options, result = impossible("zero=0")
    found = explain_infeasible(result, provider, provider.on, options).infeasible
    assert not any("ranks" in r.change or "precision" in r.change for r in found.relaxations)


def test_the_error_names_the_memory_that_would_work():
    provider, options, result = impossible()
    explained = explain_infeasible(result, provider, provider.on, options)
    error = infeasible_error(explained)
    assert error.exit_code == 5
    assert f"{explained.infeasible.smallest_bytes} bytes" in error.next_step
    assert "nothing fits" in str(infeasible_error(explained))
    assert "no plan fits" in str(infeasible_error(result))
    document = explained.infeasible.to_dict()
    assert document["smallest_bytes"] > document["limit_bytes"] == 150 * MIB


def test_a_result_with_a_plan_comes_back_unchanged():
    provider = Provider(cluster(4))
    options = SearchOptions(16)
    result = search(provider, provider.on, options)
    assert explain_infeasible(result, provider, provider.on, options) is result


@pytest.mark.parametrize("pins", ["", "pp=4", "tp=4"])
def test_the_smallest_plan_keeps_the_pins(pins):
    provider, options, result = impossible(pins)
    found = explain_infeasible(result, provider, provider.on, options).infeasible
    wanted = parse_pins(pins)
    assert wanted.pp in (None, found.smallest.mesh.pp)
    assert wanted.tp in (None, found.smallest.mesh.tp)
