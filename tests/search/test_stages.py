"""The inner search equals brute force over every cut and every set of recomputed blocks."""

from __future__ import annotations

import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.block_cost import BlockCost
from autopar.cluster import Cluster, Device, Link
from autopar.cost.memory import stage_memory
from autopar.cost.setting import Setting
from autopar.cost.step import block_times, tied_seconds
from autopar.mesh import Mesh
from autopar.search import columns, knapsack, stages


def cluster(ranks: int) -> Cluster:
    device = Device("unit", 10**9, 1e9, {"float32": 1e12}, 1.0, 1.0, 0.0, 0)
    return Cluster("unit", device, 1, ranks, (Link("link", ranks, 1e6, 1e-5),))


def block(index: int, numbers: tuple[int, ...], tied: int = 0, frozen: bool = False) -> BlockCost:
    forward, backward, comm, params, saved, inputs, transient, boundary = numbers
    return BlockCost(
        name=f"b{index}",
        kind="k",
        forward_compute=forward / 100,
        backward_compute=backward / 100,
        forward_comm=comm / 300,
        backward_comm=comm / 400,
        flops=1.0,
        parameters=params + tied,
        trainable=params + (0 if frozen else tied),
        saved_bytes=saved,
        input_bytes=inputs,
        transient_bytes=transient,
        boundary_bytes=boundary,
        parameter_reduce_seconds=comm / 1000,
        tied_parameters=tied,
        tied_trainable=0 if frozen else tied,
    )


def brute_force(
    blocks: list[BlockCost], setting: Setting, limit: float, recompute: str = "auto"
) -> float:
    """Smallest step over all cuts and recomputed sets, straight from the definition."""
    n, pp, m = len(blocks), setting.mesh.pp, setting.microbatches
    times = [block_times(b, setting) for b in blocks]
    holders = {i for i, b in enumerate(blocks) if b.tied_trainable}
    best = math.inf
    for inner in itertools.combinations(range(1, n), pp - 1):
        cuts = (0, *inner, n)
        options = []
        for i in range(pp):
            a, b = cuts[i], cuts[i + 1]
            end = (
                sum(t.end_dp + t.end_tp + t.end_optimizer for t in times[a:b]) + times[a].end_first
            )
            if holders & set(range(a, b)) and not holders <= set(range(a, b)):
                end += tied_seconds(blocks, setting)
            mine = []
            for again in itertools.product((False, True), repeat=b - a):
                if recompute == "none" and any(again) or recompute == "full" and not all(again):
                    continue
                names = {blocks[a + j].name for j, x in enumerate(again) if x}
                if stage_memory(blocks, a, b, names, i, setting).total > limit:
                    continue
                seconds = sum(t.kept for t in times[a:b]) + times[a].first_gather
                seconds += sum(times[a + j].extra for j, x in enumerate(again) if x)
                seconds += times[b - 1].send if b < n else 0.0
                seconds += times[a - 1].send if a else 0.0
                mine.append((seconds, end))
            options.append(mine)
        for choice in itertools.product(*options):
            t = [c[0] for c in choice]
            best = min(best, sum(t) + (m - 1) * max(t) + max(c[1] for c in choice))
    return best


NUMBERS = st.tuples(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(0, 5),
    st.integers(0, 400),
    st.integers(0, 500),
    st.integers(0, 120),
    st.integers(0, 100),
    st.integers(0, 60),
)


@settings(max_examples=150, deadline=None)
@given(
    numbers=st.lists(NUMBERS, min_size=3, max_size=5),
    pp=st.integers(1, 3),
    dp=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    m=st.integers(1, 5),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    precision=st.sampled_from(["fp32", "bf16-mixed", "bf16"]),
    recompute=st.sampled_from(["auto", "auto", "none", "full"]),
    fraction=st.floats(0.3, 1.1),
    tied=st.sampled_from([0, 0, 30]),
    frozen=st.booleans(),
)
def test_equals_brute_force(
    numbers, pp, dp, zero, m, schedule, precision, recompute, fraction, tied, frozen
):
    last = len(numbers) - 1
    blocks = [block(i, x, tied if i in (0, last) else 0, frozen) for i, x in enumerate(numbers)]
    setting = Setting(cluster(pp * dp), Mesh(pp, dp, 1), 1, m, schedule, zero, precision, "adamw")
    whole = max(stage_memory(blocks, 0, len(blocks), (), i, setting).total for i in range(pp))
    limit = int(whole * fraction)
    expected = brute_force(blocks, setting, limit, recompute)
    found = stages.solve(columns.build(blocks, setting), limit, recompute=recompute)
    if found is None:
        assert expected == math.inf
        return
    assert found.objective == pytest.approx(expected, rel=1e-9)
    assert found.bound <= found.objective <= found.bound * (1 + 1e-9)
    for i in range(pp):
        names = {blocks[j].name for j in found.recompute[i]}
        a, b = found.cuts[i], found.cuts[i + 1]
        assert stage_memory(blocks, a, b, names, i, setting).total == found.peaks[i] <= limit


@settings(max_examples=60, deadline=None)
@given(numbers=st.lists(NUMBERS, min_size=7, max_size=7), fraction=st.floats(0.2, 0.9))
def test_single_stage_of_seven_different_blocks(numbers, fraction):
    blocks = [block(i, x) for i, x in enumerate(numbers)]
    setting = Setting(cluster(1), Mesh(), 1, 3)
    limit = int(stage_memory(blocks, 0, 7, (), 0, setting).total * fraction)
    expected = brute_force(blocks, setting, limit)
    found = stages.solve(columns.build(blocks, setting), limit)
    assert (found.objective if found else math.inf) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 30), st.integers(1, 30), st.integers(1, 3)),
        min_size=1,
        max_size=5,
    ),
    need=st.integers(1, 150),
    k=st.integers(1, 4),
)
def test_both_knapsacks_equal_enumeration(rows, need, k):
    extra = np.array([r[0] for r in rows for _ in range(r[3])], float)
    gain = np.array([r[1] for r in rows for _ in range(r[3])])
    saved = gain + np.array([r[2] for r in rows for _ in range(r[3])])
    items, which = knapsack.distinct_items(extra, gain, saved)
    counts = np.bincount(which, minlength=len(items))
    expected = math.inf
    for pick in itertools.product(*(range(c + 1) for c in counts)):
        if any(pick):
            freed = k * int(np.dot(pick, items.gain))
            rebuilt = max(int(items.saved[d]) for d, c in enumerate(pick) if c)
            if freed - rebuilt >= need:
                expected = min(expected, float(np.dot(pick, items.extra)))
    one, choice = knapsack.cheapest(items, counts.tolist(), need, k)
    assert one == pytest.approx(expected)
    if choice:
        assert float(np.dot(choice, items.extra)) == pytest.approx(one)
        assert all(c <= n for c, n in zip(choice, counts, strict=True))
    many = knapsack.cheapest_many(items, counts[None, :], np.array([need]), np.array([k]))
    assert many is not None and many[0] == pytest.approx(expected)


def test_given_starts_are_kept():
    blocks = [block(i, (2, 3, 0, 10, 50, 10, 5, 5)) for i in range(6)]
    setting = Setting(cluster(2), Mesh(2, 1, 1), 1, 4)
    found = stages.solve(columns.build(blocks, setting), 10**9, starts=(0, 1))
    assert found is not None and found.cuts == (0, 1, 6)


def test_cutoff_prunes():
    blocks = [block(i, (2, 3, 0, 10, 50, 10, 5, 5)) for i in range(6)]
    table = columns.build(blocks, Setting(cluster(2), Mesh(2, 1, 1), 1, 4))
    best = stages.solve(table, 10**9)
    assert best is not None
    assert stages.solve(table, 10**9, cutoff=best.objective * 0.999) is None
    assert stages.solve(table, 10**9, cutoff=best.objective * 1.001) is not None


def test_more_stages_than_blocks_is_no_solution():
    blocks = [block(i, (2, 3, 0, 10, 50, 10, 5, 5)) for i in range(2)]
    assert stages.solve(columns.build(blocks, Setting(cluster(3), Mesh(3), 1, 4)), 10**9) is None


def test_128_blocks_on_16_stages_is_fast_with_memory_binding():
    blocks = [block(i, (2, 4, 1, 30, 5000, 60, 50, 20)) for i in range(128)]
    setting = Setting(cluster(16), Mesh(16, 1, 1), 1, 64)
    table = columns.build(blocks, setting)
    free = stages.solve(table, 10**12)
    assert free is not None
    full = stages.solve(table, 10**12, recompute="full")
    assert full is not None
    first = blocks[:8]
    kept = stage_memory(blocks, 0, 8, (), 0, setting).total
    freed = stage_memory(blocks, 0, 8, {b.name for b in first}, 0, setting).total
    limit = (kept + freed) // 2
    begin = time.perf_counter()
    tight = stages.solve(table, limit)
    seconds = time.perf_counter() - begin
    assert tight is not None and free.objective < tight.objective < full.objective
    assert seconds < 3.0  # about 0.05 s on an idle core
