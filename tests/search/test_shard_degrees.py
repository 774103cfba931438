"""Over how many ranks ZeRO shards: bounds of all at once, and a search that misses none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.setting import Setting
from autopar.mesh import Mesh
from autopar.search import shard_degrees
from autopar.search.best_first import TIE, solve_stages
from autopar.search.bounds import bound, cut_seconds
from autopar.search.chain import Chain
from autopar.search.enumerate import legal_settings, search
from autopar.search.options import SearchOptions, parse_pins
from autopar.search.shard_degrees import end_gain, families, undominated
from tests.search.synthetic import Provider, cluster
from tests.search.test_enumerate import try_everything

GIB = 2**30


def hybrids(on, zero, *, pp=1, chunks=1, microbatches=4, optimizer="adamw"):
    """Settings of all numbers of groups, those of the most ranks first."""
    dp = on.size // pp
    schedule = "interleaved" if chunks > 1 else "1f1b"
    given = 1, microbatches, schedule, zero, "bf16-mixed", optimizer, chunks
    groups = [g for g in range(1, dp) if dp % g == 0]
    return [Setting(on, Mesh(pp, dp, 1, dp_replicate=g), *given) for g in groups]


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(
    per_node=st.sampled_from([2, 4, 8]),
    zero=st.integers(1, 3),
    shape=st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    microbatches=st.sampled_from([2, 4]),
    width=st.sampled_from([512, 4096]),
    tied=st.booleans(),
    gib=st.floats(0.5, 8.0),
)
def test_a_bound_of_all_is_below_each_and_what_is_dominated_is_no_better(
    per_node, zero, shape, microbatches, width, tied, gib
):
    on, (pp, chunks) = cluster(16, per_node=per_node), shape
    provider = Provider(on, layers=4, width=width, tied=tied)
    chain = Chain(provider.blocks(1, 1, split=False))
    among = hybrids(on, zero, pp=pp, chunks=chunks, microbatches=microbatches)
    limit = int(gib * GIB)
    together = bound(chain, among[0], among=among, keeps_within=limit)
    found = [solve_stages(chain, s, limit, "auto", None) for s in among]
    best = min((f.objective for f in found if f), default=float("inf"))
    for setting, solved in zip(among, found, strict=True):
        alone = bound(chain, setting, keeps_within=limit)
        assert together.seconds <= alone.seconds and together.peak <= alone.peak
        if solved is not None:
            assert alone.seconds <= solved.objective * (1 + 1e-12)
    if chunks > 1:
        assert cut_seconds(chain, among[0], limit, among=among) <= best * (1 + 1e-12)
    kept = undominated(chain, among, range(len(among)))
    assert kept[0] == 0 and (zero == 1 or kept == list(range(len(among))))
    least = min((found[i].objective for i in kept if found[i]), default=float("inf"))
    assert least == pytest.approx(best, rel=1e-12)
    for setting, solved in zip(among[1:], found[1:], strict=True) if zero == 1 else ():
        if solved is not None:
            gain = end_gain(chain, among[0], setting, solved.objective)
            assert found[0].objective <= (solved.objective + gain) * (1 + 1e-12)


def test_families_differ_in_the_number_of_groups_alone():
    on = cluster(8)
    one, three = hybrids(on, 1), hybrids(on, 3)
    found = [*one[::-1], *three]
    # Three numbers of groups each: 1, 2 and 4.
    assert families(found) == {2: (2, 1, 0), 3: (3, 4, 5)}
    for least, *_ in families(found).values():
        assert found[least].mesh.dp_replicate == 1
    # Small parts of 8-bit states are not quantised: a smaller shard can take more.
    assert families(hybrids(on, 1, optimizer="adamw-8bit")) == {0: (0,), 1: (1,), 2: (2,)}


@settings(max_examples=15, deadline=None, derandomize=True, database=None)
@given(
    ranks=st.sampled_from([8, 12]),
    per_node=st.sampled_from([2, 4]),
    width=st.sampled_from([512, 2048]),
    gib=st.floats(0.5, 6.0),
    zero=st.sampled_from([None, 1, 2, 3]),
    tied=st.booleans(),
    optimizer=st.sampled_from(["adamw", "adafactor", "adamw-8bit"]),
)
def test_finds_what_trying_every_number_finds(ranks, per_node, width, gib, zero, tied, optimizer):
    provider = Provider(cluster(ranks, per_node=per_node), layers=3, width=width, tied=tied)
    options = SearchOptions(24, optimizer=optimizer, memory_limit=int(gib * GIB))
    if zero is not None:
        options = replace(options, pins=parse_pins(f"zero={zero}"))
    result = search(provider, provider.on, options, explain=False)
    expected = try_everything(provider, options)
    if expected is None:
        assert result.choice is None
        return
    assert result.step_seconds == pytest.approx(expected, rel=2 * TIE)


def hybrid_provider() -> Provider:
    """Eight nodes of four ranks, and a slow network: shards in the node are best."""
    return Provider(cluster(32, per_node=4), layers=4, width=2048)


def test_the_free_search_shards_in_the_node_where_the_network_is_slow(monkeypatch):
    provider = hybrid_provider()
    options = SearchOptions(256, pins=parse_pins("tp=1,pp=1,zero=3"), memory_limit=6 * GIB)
    result = search(provider, provider.on, options)
    mesh = result.choice.mesh
    assert result.status == "optimal" and 1 < mesh.dp_shard < mesh.replicas
    whole = replace(options, pins=parse_pins(f"tp=1,pp=1,zero=3,shard={mesh.replicas}"))
    slower = search(provider, provider.on, whole, explain=False)
    assert slower.choice.mesh.dp_replicate == 1
    assert slower.step_seconds > 1.01 * result.step_seconds
    beside = {n.change: n for n in result.neighbours}
    for shard in (mesh.dp_shard // 2, mesh.dp_shard * 2):
        if shard > 1:
            found = beside[f"shard over {shard}"]
            assert not found.fits or found.choice.mesh.dp_shard == shard
    # Runners-up are other shapes of the mesh, not other numbers of groups.
    assert all(c.mesh.shape != mesh.shape for c in result.alternatives)
    # Left to families of one, it comes to the same.
    alone = {i: (i,) for i in range(10_000)}
    monkeypatch.setattr(
        "autopar.search.best_first.families",
        lambda found: {i: alone[i] for i in range(len(found))},
    )
    assert search(provider, provider.on, options, explain=False).choice == result.choice


def test_a_pin_keeps_the_number_and_leaves_out_what_it_does_not_divide():
    provider = hybrid_provider()
    options = SearchOptions(96, pins=parse_pins("shard=4,pp=1"))
    found, notes = legal_settings(provider, provider.on, options)
    assert {s.mesh.dp_shard for s in found} == {4} and {s.zero for s in found} == {1, 2, 3}
    assert {s.mesh.replicas for s in found} == {32, 16, 8, 4}
    assert any("shard=4: ZeRO-0 shards nothing" in note for note in notes)
    assert search(provider, provider.on, options).choice.mesh.dp_shard == 4


def test_recipes_know_shards_in_the_node_and_copies_across():
    names = {}
    for ranks in (4, 32):
        provider = Provider(cluster(ranks, per_node=4))
        found = search(provider, provider.on, SearchOptions(64)).recipes
        names[ranks] = {r.name.split()[0]: r for r in found}
    assert "HSDP" not in names[4]
    mesh = names[32]["HSDP"].choice.mesh
    assert (mesh.dp, mesh.dp_shard, mesh.dp_replicate) == (32, 4, 8)
    assert shard_degrees.families([names[32]["HSDP"].choice.setting]) == {0: (0,)}
