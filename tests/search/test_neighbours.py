"""Neighbours of a plan: one decision changed, and what is said of each is what a search finds."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.errors import UsageError
from autopar.search.best_first import TIE
from autopar.search.enumerate import search
from autopar.search.options import SearchOptions, parse_pins
from tests.search.synthetic import Provider, cluster

GIB = 2**30
PINS = {
    "TP": "tp={}",
    "PP": "pp={}",
    "ZeRO-": "zero={}",
    "shard over": "shard={}",
    "micro-batch of": "microbatch={}",
    "no recomputation": "recompute=none",
    "full recomputation": "recompute=full",
    "all blocks resharded": "reshard=all",
    "schedule": "schedule={}",
    "no sequence parallelism": "boundary=R",
    "sequence parallelism": "boundary=S(1)",
}


def pin_of(change: str) -> str:
    if change.endswith(" chunks"):
        return f"chunks={change.removesuffix(' chunks')}"
    name = max((n for n in PINS if change.startswith(n)), key=len)
    return PINS[name].format(change.removeprefix(name).strip())


@settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(
    ranks=st.sampled_from([2, 8, 12]),
    width=st.sampled_from([512, 4096]),
    gib=st.floats(1.0, 40.0),
)
def test_a_neighbour_is_the_best_plan_with_its_decision(ranks, width, gib):
    provider = Provider(cluster(ranks), width=width)
    options = SearchOptions(24, memory_limit=int(gib * GIB))
    result = search(provider, provider.on, options)
    if result.choice is None:
        assert result.neighbours == ()
        return
    assert result.neighbours
    best = result.choice
    for found in result.neighbours:
        if not found.fits:
            assert found.choice is None and "needs" in found.reason
            continue
        other = found.choice
        assert other.step_seconds >= best.step_seconds * (1 - TIE)
        assert max(other.peaks) <= options.memory_limit
        pins = (
            f"tp={other.mesh.tp},pp={other.mesh.pp},zero={other.zero},schedule={other.schedule},"
            f"microbatch={other.microbatch},boundary={other.boundary}"
        )
        if other.zero and other.mesh.replicas > 1:
            pins += f",shard={other.mesh.dp_shard}"
        if other.keep_label:
            pins += ",reshard=auto"
        # A plan without chunks is held against the best number of them.
        if not (found.change.startswith("schedule") and other.chunks > best.chunks == 1):
            pins += f",chunks={other.chunks}"
        if "recomputation" in found.change:
            pins += f",recompute={other.recompute_label}"
        same = replace(options, pins=parse_pins(pins))
        alone = search(provider, provider.on, same, explain=False)
        assert other.step_seconds == pytest.approx(alone.step_seconds, rel=2 * TIE)
        one = replace(options, pins=parse_pins(pin_of(found.change)))
        assert search(provider, provider.on, one, explain=False).step_seconds <= (
            other.step_seconds * (1 + TIE)
        )


def test_what_does_not_fit_says_what_it_needs():
    provider = Provider(cluster(8), width=2048)
    options = SearchOptions(64, memory_limit=int(2.7 * GIB), pins=parse_pins("chunks=1"))
    result = search(provider, provider.on, options)
    needs = {n.change: n.reason for n in result.neighbours if not n.fits}
    assert set(needs) == {
        *("PP 1", "ZeRO-0", "shard over 2", "no recomputation", "schedule zero-bubble"),
    }
    best = result.choice
    kept = f"tp={best.mesh.tp},pp={best.mesh.pp},microbatch={best.microbatch},schedule=1f1b"
    kept += f",shard={best.mesh.dp_shard}"
    pins = parse_pins(f"{kept},zero={best.zero},recompute=none")
    need = float(re.fullmatch(r"needs ([0-9.]+) GiB of 2.7 GiB", needs["no recomputation"])[1])
    for gib, fits in ((need + 0.05, True), (need - 0.05, False)):
        limit = replace(options, pins=pins, memory_limit=int(gib * GIB))
        assert (search(provider, provider.on, limit, explain=False).choice is not None) == fits


def test_a_pinned_decision_has_no_neighbours():
    provider = Provider(cluster(8))
    result = search(provider, provider.on, SearchOptions(16, pins=parse_pins("tp=2,zero=1")))
    assert result.neighbours
    for found in result.neighbours:
        assert not found.change.startswith(("TP", "ZeRO"))
        assert found.choice is None or (found.choice.mesh.tp, found.choice.zero) == (2, 1)


def test_no_wider_tp_has_its_reason():
    provider = Provider(cluster(8), heads=1)
    result = search(provider, provider.on, SearchOptions(64))
    (told,) = [n for n in result.neighbours if n.change.startswith("TP")]
    assert told.fits is None and told.choice is None
    assert told.reason == "no matrix product of the model splits over 2 ranks"
    pinned = SearchOptions(64, pins=parse_pins("tp=1"))
    result = search(provider, provider.on, pinned)
    assert not [n for n in result.neighbours if n.change.startswith("TP")]


def test_another_mesh_takes_another_micro_batch_where_the_samples_ask_for_it():
    provider = Provider(cluster(8), width=512)
    options = SearchOptions(24, memory_limit=GIB, pins=parse_pins("microbatch=2,dp=1,zero=0"))
    assert search(provider, provider.on, options).choice is not None
    free = search(provider, provider.on, SearchOptions(24, memory_limit=GIB))
    meshes = {n.choice.mesh.shape for n in free.neighbours if n.fits and n.change.startswith("PP")}
    assert meshes  # 24 samples over another dp: 3 of each replica are no micro-batches of 2
    assert not [n for n in free.neighbours if n.fits is None]


def test_a_micro_batch_that_does_not_divide_is_told_with_the_samples():
    provider = Provider(cluster(8))
    options = SearchOptions(24, pins=parse_pins("microbatch=2,pp=1,tp=1"))
    with pytest.raises(UsageError, match="microbatch=2 does not divide the 3 samples of a dp rank"):
        search(provider, provider.on, options)
    options = SearchOptions(24, pins=parse_pins("microbatches=2,pp=1,tp=1"))
    with pytest.raises(UsageError, match="the 3 samples of a dp rank make no 2 micro-batches"):
        search(provider, provider.on, options)
    options = SearchOptions(24, pins=parse_pins("shard=3"))
    with pytest.raises(UsageError, match="shard=3 does not divide the 8 ranks") as error:
        search(provider, provider.on, options)
    assert "shard=2, 4, 8" in str(error.value)


def test_a_time_limit_holds_for_neighbours_too():
    provider = Provider(cluster(8), width=2048)
    result = search(provider, provider.on, SearchOptions(64, time_limit=0.0))
    assert result.choice is not None
    reasons = {n.reason for n in result.neighbours}
    assert "not solved within the time limit" in reasons
    assert all(n.choice is None for n in result.neighbours)
