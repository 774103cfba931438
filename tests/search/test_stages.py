"""The inner search equals brute force over every cut and every set of recomputed blocks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.block_cost import BlockCost, PartialRecompute, Tied, tie_groups, with_last_holders
from autopar.cluster import Cluster, Device, Link
from autopar.cost.fullest_moment import stage_memory
from autopar.cost.setting import Practice, Setting
from autopar.cost.step import block_times, extra_seconds, tied_seconds
from autopar.mesh import Mesh
from autopar.search import columns, interleaved, stages
from autopar.search.chain import Chain


def cluster(ranks: int) -> Cluster:
    device = Device("unit", 10**9, 1e9, {"float32": 1e12}, 1.0, 1.0, 0.0, 0)
    return Cluster("unit", device, 1, ranks, (Link("link", ranks, 1e6, 1e-5),))


def block(
    index: int,
    numbers: tuple[int, ...],
    tied: Mapping[str, int] = MappingProxyType({}),
    frozen: bool = False,
    partial: tuple[tuple[float, int, int], ...] = (),
) -> BlockCost:
    """`tied`: elements of each group. `partial`: of each set of ops its part of the forward's
    seconds, bytes kept, and rebuilt."""
    forward, backward, comm, params, saved, inputs, transient, boundary = numbers
    return BlockCost(
        name=f"b{index}",
        kind="k",
        forward_compute=forward / 100,
        backward_compute=backward / 100,
        forward_comm=comm / 300,
        backward_comm=comm / 400,
        flops=1.0,
        parameters=params + sum(tied.values()),
        trainable=params + (0 if frozen else sum(tied.values())),
        saved_bytes=saved,
        input_bytes=inputs,
        transient_bytes=transient,
        boundary_bytes=boundary,
        parameter_reduce_seconds=comm / 1000,
        tied=tuple(Tied(group, n, 0 if frozen else n) for group, n in tied.items()),
        reduced_transient_bytes=transient + params % 50,
        largest_parameter=params // 2,
        last_parameter=params // (1 + index % 4),
        saved_input_bytes=min(saved, inputs) // 2,
        released_bytes=saved // 7,
        forward_transient_bytes=transient * 2 // 3,
        fleeting_bytes=transient + saved * (index % 3) // 3,
        shared_bytes=transient // 4,
        shared_kept_bytes=transient // 4 * (index % 3) // 2,
        shared_key=("", "a", "b")[transient % 3],
        partial=tuple(
            PartialRecompute(
                f"set {i}", ("op",), share * forward / 100, share * comm / 300, kept, again
            )
            for i, (share, kept, again) in enumerate(partial, 1)
        ),
    )


# Sets of ops of a Llama layer on one H100: part of the forward's seconds, and bytes kept of 5000.
LLAMA = ((0.02, 4330), (0.04, 3650), (0.13, 2210), (0.45, 870), (0.62, 390))


def choices(block: BlockCost, recompute: str) -> list[PartialRecompute | None]:
    """How a block may be recomputed, or None."""
    if recompute == "full":
        return [block.option("full")] if block.options else [None]
    found = {"none": (), "selective": block.partial, "auto": block.options}[recompute]
    return [None, *found]


def ties(index: int, last: int, ends: int, inner: Collection[int]) -> dict[str, int]:
    """Elements of two groups: one of the first and the last block, one of the `inner` ones."""
    found = {"ends": ends} if ends and index in (0, last) else {}
    return found | ({"inner": 20} if index in inner else {})


def brute_force(
    blocks: list[BlockCost], setting: Setting, limit: float, recompute: str = "auto"
) -> float:
    """Smallest step over all cuts and recomputed sets, straight from the definition."""
    n, pp, m = len(blocks), setting.mesh.pp, setting.microbatches
    times = [block_times(b, setting) for b in blocks]
    holders = {
        group: {i for i, b in enumerate(blocks) if b.tied_as(group).trainable}
        for group in tie_groups(blocks)
    }
    best = math.inf
    for inner in itertools.combinations(range(1, n), pp - 1):
        cuts = (0, *inner, n)
        if pp > 1 and any(
            not any(block.parameters for block in blocks[a:b]) for a, b in itertools.pairwise(cuts)
        ):
            continue
        options = []
        for i in range(pp):
            a, b = cuts[i], cuts[i + 1]
            end = (
                sum(t.end_dp + t.end_tp + t.end_optimizer for t in times[a:b]) + times[a].end_first
            )
            for group, held in holders.items():
                if held & set(range(a, b)) and not held <= set(range(a, b)):
                    end += tied_seconds(blocks, group, setting)
            mine = []
            for again in itertools.product(*(choices(blocks[j], recompute) for j in range(a, b))):
                names = {blocks[a + j].name: x.label for j, x in enumerate(again) if x}
                if stage_memory(blocks, a, b, names, i, setting).total > limit:
                    continue
                seconds = sum(t.kept for t in times[a:b]) + times[a].first_gather
                seconds += sum(
                    extra_seconds(blocks[a + j], x, setting) for j, x in enumerate(again) if x
                )
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


# Of a set of ops: its part of the forward's seconds, bytes kept, and bytes rebuilt.
SETS = st.tuples(st.sampled_from([0.1, 0.3, 0.8]), st.integers(0, 300), st.integers(0, 300))


@settings(max_examples=200, deadline=None)
@given(
    numbers=st.lists(NUMBERS, min_size=3, max_size=5),
    pp=st.integers(1, 3),
    dp=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    m=st.integers(1, 5),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    precision=st.sampled_from(["fp32", "bf16-mixed", "bf16"]),
    recompute=st.sampled_from(["auto", "auto", "selective", "none", "full"]),
    fraction=st.floats(0.3, 1.1),
    tied=st.sampled_from([0, 0, 30]),
    inner=st.sampled_from([(), (1, 2), (0, 1), (0, 2, 3)]),
    frozen=st.booleans(),
    partial=st.lists(st.lists(SETS, max_size=2).map(tuple), min_size=5, max_size=5),
    few_cells=st.sampled_from([0, 60_000]),
)
def test_equals_brute_force(
    numbers, pp, dp, zero, m, schedule, precision, recompute, fraction, tied, frozen, partial,
    inner, few_cells,
):  # fmt: skip
    last = len(numbers) - 1
    blocks = with_last_holders(
        [block(i, x, ties(i, last, tied, inner), frozen, partial[i]) for i, x in enumerate(numbers)]
    )
    setting = Setting(cluster(pp * dp), Mesh(pp, dp, 1), 1, m, schedule, zero, precision, "adamw")
    whole = max(stage_memory(blocks, 0, len(blocks), (), i, setting).total for i in range(pp))
    limit = int(whole * fraction)
    expected = brute_force(blocks, setting, limit, recompute)
    with mock.patch.object(stages, "FEW_CELLS", few_cells):  # how a long chain is searched
        found = stages.solve(columns.build(blocks, setting), limit, recompute=recompute)
    if found is None:
        assert expected == math.inf
        return
    assert found.objective == pytest.approx(expected, rel=1e-9)
    assert found.bound <= found.objective <= found.bound * (1 + 1e-9)
    for i in range(pp):
        names = {blocks[j].name: "full" for j in found.recompute[i]}
        names |= {blocks[j].name: label for j, label in found.partial[i].items()}
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


def test_128_blocks_with_sets_of_ops_on_8_stages_are_fast_with_memory_binding():
    sets = tuple((share, kept, 5000 - kept) for share, kept in LLAMA)
    blocks = [block(i, (2, 4, 1, 30, 5000, 60, 50, 20), partial=sets) for i in range(128)]
    setting = Setting(cluster(8), Mesh(8, 1, 1), 1, 64)
    table = columns.build(blocks, setting)
    free = stages.solve(table, 10**12)
    assert free is not None
    whole = max(stage_memory(blocks, 16 * i, 16 * i + 16, (), i, setting).total for i in range(8))
    for fraction in (0.9, 0.6, 0.3):
        begin = time.perf_counter()
        tight = stages.solve(table, int(whole * fraction))
        seconds = time.perf_counter() - begin
        assert tight is not None and any(tight.partial)
        assert tight.objective > free.objective
        assert seconds < 5.0  # well below a second on an idle core


PRACTICES = (
    Practice(),
    Practice(gradient_buffer="each"),
    Practice(bucket_bytes=50, gradient_buffer="end"),
    Practice(gradient_buffer="end", gradient_buckets=True),
)


@settings(max_examples=60, deadline=None)
@given(
    numbers=st.lists(NUMBERS, min_size=3, max_size=6),
    pp=st.integers(1, 3),
    dp=st.sampled_from([1, 2]),
    zero=st.integers(0, 3),
    m=st.integers(1, 4),
    precision=st.sampled_from(["fp32", "bf16-mixed", "bf16"]),
    tied=st.sampled_from([0, 30]),
    inner=st.sampled_from([(), (1, 2), (0, 1), (0, 2)]),
    practice=st.sampled_from(PRACTICES),
)
def test_tables_are_the_evaluation_of_every_interval(
    numbers, pp, dp, zero, m, precision, tied, inner, practice
):
    last = len(numbers) - 1
    blocks = with_last_holders(
        [block(i, x, ties(i, last, tied, inner)) for i, x in enumerate(numbers)]
    )
    on, zero = cluster(pp * dp), min(zero, 1) if practice.gradient_buffer else zero
    setting = Setting(
        on, Mesh(pp, dp, 1), 1, m, "1f1b", zero, precision, "adamw", practice=practice
    )
    memory = columns.build(blocks, setting).memory
    for stage in range(pp):
        for a, b in itertools.combinations(range(len(blocks) + 1), 2):
            expected = stage_memory(blocks, a, b, (), stage, setting).total
            assert memory.peak(stage, a, b, ()) == expected


def test_no_stage_ends_where_the_pipeline_can_not_send():
    blocks = [block(i, (2, 3, 0, 10, 50, 10, 5, 5)) for i in range(6)]
    assert plain_cuts(blocks, 1) == (0, 3, 6)
    blocks[2] = replace(blocks[2], can_end_stage=False)
    assert plain_cuts(blocks, 1) in ((0, 2, 6), (0, 4, 6))
    for cut in plain_cuts([*blocks, *blocks], 2)[1:-1]:
        assert cut not in (3, 9)


def plain_cuts(blocks, chunks):
    """The cuts of two pipeline ranks."""
    schedule = "interleaved" if chunks > 1 else "1f1b"
    setting = Setting(cluster(2), Mesh(2, 1, 1), 1, 4, schedule, chunks=chunks)
    if chunks > 1:
        found = interleaved.solve(Chain(blocks), setting, 10**9)
    else:
        found = stages.solve(columns.build(blocks, setting), 10**9)
    assert found is not None
    return found.cuts
