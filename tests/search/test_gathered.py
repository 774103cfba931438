"""Which blocks of ZeRO-3 are kept gathered: the search equals brute force over every cut, set of
recomputed blocks and set of kept blocks (of alike blocks those that are searched)."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.block_cost import BlockCost, tie_groups, with_last_holders
from autopar.cost.fullest_moment import stage_memory
from autopar.cost.setting import Setting
from autopar.cost.step import block_times, extra_seconds, tied_seconds
from autopar.mesh import Mesh
from autopar.search import columns, gathered, stages
from autopar.search.chain import Chain
from autopar.search.enumerate import legal_settings, search
from autopar.search.options import SearchOptions, parse_pins
from autopar.search.prices import Prices
from autopar.search.result import SearchResult
from autopar.search.smallest_memory import smallest_memory
from autopar.workflow.outcome import kept_gathered
from tests.search import synthetic
from tests.search.test_stages import LLAMA, NUMBERS, SETS, block, choices, cluster, ties


def stage_ends(
    blocks: list[BlockCost], setting: Setting, a: int, b: int, kept: set[int]
) -> tuple[float, float]:
    """Seconds of a micro-batch without recomputation, and of the end of the step, of a stage."""
    n, found = len(blocks), [0.0, 0.0]
    for j in range(a, b):
        t = block_times(blocks[j], setting.keeping if j in kept else setting)
        found[0] += t.kept + (t.first_gather if j == a else 0.0)
        found[1] += t.end_dp + t.end_tp + t.end_optimizer + (t.end_first if j == a else 0.0)
    found[0] += block_times(blocks[b - 1], setting).send if b < n else 0.0
    found[0] += block_times(blocks[a - 1], setting).send if a else 0.0
    for group in tie_groups(blocks):
        held = {i for i, x in enumerate(blocks) if x.tied_as(group).trainable}
        if held & set(range(a, b)) and not held <= set(range(a, b)):
            found[1] += tied_seconds(blocks, group, setting)
    return found[0], found[1]


def subsets(a: int, b: int) -> list[set[int]]:
    every = (itertools.combinations(range(a, b), k) for k in range(b - a + 1))
    return [set(some) for sets in every for some in sets]


def brute_force(
    blocks: list[BlockCost],
    setting: Setting,
    limit: float,
    recompute: str = "auto",
    sets: Callable[[int, int], list[set[int]]] = subsets,
) -> float:
    """Smallest step over all choices, straight from the definition. `sets`: of kept blocks of a
    stage."""
    n, pp, m = len(blocks), setting.mesh.pp, setting.microbatches
    best = math.inf
    for inner in itertools.combinations(range(1, n), pp - 1):
        cuts = (0, *inner, n)
        if pp > 1 and any(
            not any(x.parameters for x in blocks[a:b]) for a, b in itertools.pairwise(cuts)
        ):
            continue
        options = []
        for i, (a, b) in enumerate(itertools.pairwise(cuts)):
            mine = []
            for kept in sets(a, b):
                seconds, end = stage_ends(blocks, setting, a, b, kept)
                names = {blocks[j].name for j in kept}
                for again in itertools.product(*(choices(x, recompute) for x in blocks[a:b])):
                    labels = {blocks[a + j].name: x.label for j, x in enumerate(again) if x}
                    total = stage_memory(blocks, a, b, labels, i, setting, kept=names).total
                    if total > limit:
                        continue
                    extra = sum(
                        extra_seconds(
                            blocks[a + j], x, setting.keeping if a + j in kept else setting
                        )
                        for j, x in enumerate(again)
                        if x
                    )
                    mine.append((seconds + extra, end))
            options.append(list(dict.fromkeys(mine)))
        for choice in itertools.product(*options):
            t = [c[0] for c in choice]
            best = min(best, sum(t) + (m - 1) * max(t) + max(c[1] for c in choice))
    return best


def assert_same(found: stages.StageSolution | None, expected: float) -> None:
    assert (found.objective if found else math.inf) == pytest.approx(expected, rel=1e-9)


def assert_consistent(
    found: stages.StageSolution, blocks: list[BlockCost], setting: Setting, limit: int
) -> None:
    """Bytes and seconds of a solution are those of its choices."""
    seconds, ends = [], []
    for i, (a, b) in enumerate(itertools.pairwise(found.cuts)):
        kept = set(found.kept[i])
        labels = {blocks[j].name: "full" for j in found.recompute[i]}
        labels |= {blocks[j].name: label for j, label in found.partial[i].items()}
        names = {blocks[j].name for j in kept}
        total = stage_memory(blocks, a, b, labels, i, setting, kept=names).total
        assert total == found.peaks[i] <= limit
        mine, end = stage_ends(blocks, setting, a, b, kept)
        for j in range(a, b):
            if blocks[j].name in labels:
                as_kept = setting.keeping if j in kept else setting
                mine += extra_seconds(blocks[j], blocks[j].option(labels[blocks[j].name]), as_kept)
        seconds.append(mine)
        ends.append(end)
    step = sum(seconds) + (setting.microbatches - 1) * max(seconds) + max(ends)
    assert step == pytest.approx(found.objective, rel=1e-9)
    assert found.bound <= found.objective <= found.bound * (1 + 1e-9)


@settings(max_examples=150, deadline=None)
@given(
    numbers=st.lists(NUMBERS, min_size=2, max_size=4),
    pp=st.integers(1, 2),
    copies=st.sampled_from([1, 1, 2]),
    m=st.integers(1, 4),
    schedule=st.sampled_from(["gpipe", "1f1b"]),
    precision=st.sampled_from(["fp32", "bf16-mixed"]),
    recompute=st.sampled_from(["auto", "auto", "selective", "none", "full"]),
    fraction=st.floats(0.5, 1.05),
    tied=st.sampled_from([0, 0, 30]),
    inner=st.sampled_from([(), (1, 2), (0, 1)]),
    partial=st.lists(st.lists(SETS, max_size=1).map(tuple), min_size=4, max_size=4),
    few_cells=st.sampled_from([0, 60_000]),
)
def test_equals_brute_force(
    numbers, pp, copies, m, schedule, precision, recompute, fraction, tied, inner, partial,
    few_cells,
):  # fmt: skip
    last = len(numbers) - 1
    blocks = with_last_holders(
        [block(i, x, ties(i, last, tied, inner), False, partial[i]) for i, x in enumerate(numbers)]
    )
    mesh = Mesh(pp, 2 * copies, 1, dp_replicate=copies)
    setting = Setting(cluster(mesh.size), mesh, 1, m, schedule, 3, precision, "adamw")
    names = [b.name for b in blocks]
    whole = max(
        stage_memory(blocks, 0, len(blocks), (), i, setting, kept=names).total for i in range(pp)
    )
    limit = int(whole * fraction)
    with mock.patch.object(stages, "FEW_CELLS", few_cells):
        found = gathered.solve(Chain(blocks), setting, limit, recompute=recompute)
    which = Chain(blocks).which.tolist()
    expected = brute_force(
        blocks, setting, limit, recompute, lambda a, b: alike_choices(a, b, which)
    )
    assert_same(found, expected)
    if found is not None:
        assert_consistent(found, blocks, setting, limit)


def alike_choices(a: int, b: int, which: list[int]) -> list[set[int]]:
    """The sets of kept blocks that are searched: of alike blocks the last, and the first of all."""
    found = []
    for kept in subsets(a, b):
        rest = [(which[j], j in kept) for j in range(a + 1, b)]
        sorts = [[keep for sort, keep in rest if sort == s] for s in set(which)]
        if all(mine == sorted(mine) for mine in sorts):
            found.append(kept)
    return found


@settings(max_examples=60, deadline=None)
@given(
    embed=NUMBERS, layer=NUMBERS, head=NUMBERS,
    layers=st.integers(1, 3),
    pp=st.integers(1, 2),
    m=st.integers(1, 4),
    fraction=st.floats(0.5, 1.0),
)  # fmt: skip
def test_alike_blocks_are_kept_from_the_last(embed, layer, head, layers, pp, m, fraction):
    blocks = [block(0, embed), *(block(i + 1, layer) for i in range(layers))]
    blocks.append(block(layers + 1, head))
    chain = Chain(blocks)
    setting = Setting(cluster(2 * pp), Mesh(pp, 2, 1), 1, m, "gpipe", 3, "bf16-mixed")
    names = [b.name for b in blocks]
    whole = max(
        stage_memory(blocks, 0, len(blocks), (), i, setting, kept=names).total for i in range(pp)
    )
    limit = int(whole * fraction)
    which = chain.which.tolist()
    expected = brute_force(blocks, setting, limit, sets=lambda a, b: alike_choices(a, b, which))
    found = gathered.solve(chain, setting, limit)
    assert_same(found, expected)
    if found is not None:
        assert_consistent(found, blocks, setting, limit)


def chain_of(layers: int) -> list[BlockCost]:
    """An embedding, alike layers with sets of ops, and a head."""
    sets = tuple((share, kept, 5000 - kept) for share, kept in LLAMA)
    embed = block(0, (1, 2, 0, 20000, 50, 10, 5, 20))
    inner = [
        block(i, (20, 40, 1, 3000, 5000, 60, 50, 20), partial=sets) for i in range(1, layers + 1)
    ]
    return [embed, *inner, block(layers + 1, (30, 60, 0, 20000, 600, 60, 50, 20))]


def needs(blocks: list[BlockCost], setting: Setting, *, all_kept: bool) -> int:
    """Bytes of the fullest of even stages: all kept gathered and nothing recomputed, or the other
    way round."""
    pp, n = setting.mesh.pp, len(blocks)
    names = [b.name for b in blocks]
    again, kept = ([], names) if all_kept else (names, [])
    edges = [n * i // pp for i in range(pp + 1)]
    return max(
        stage_memory(blocks, edges[i], edges[i + 1], again, i, setting, kept=kept).total
        for i in range(pp)
    )


@pytest.mark.parametrize(("pp", "room"), [(1, 0.6), (8, 0.3)])
def test_many_blocks_are_fast_and_better_than_both_levels(pp: int, room: float) -> None:
    blocks = chain_of(126)
    chain = Chain(blocks)
    mesh = Mesh(pp, 8, 1)
    setting = Setting(cluster(mesh.size), mesh, 1, 4 * pp, "1f1b", 3, "bf16-mixed")
    least, most = (needs(blocks, setting, all_kept=kept) for kept in (False, True))
    limit = int(least + room * (most - least))
    begin = time.perf_counter()
    found = gathered.solve(chain, setting, limit)
    seconds = time.perf_counter() - begin
    assert found is not None and 0 < sum(map(len, found.kept)) < len(blocks)
    for other in (setting, setting.keeping):
        alone = stages.solve(columns.build(chain, other), limit)
        assert alone is None or found.objective < alone.objective * (1 - 1e-6)
    assert seconds < 10.0  # below a second on an idle core


def test_with_room_for_all_it_is_zero_2() -> None:
    blocks = chain_of(6)
    setting = Setting(cluster(16), Mesh(2, 8, 1), 1, 4, "1f1b", 3, "bf16-mixed")
    found = gathered.solve(Chain(blocks), setting, 10**12)
    other = stages.solve(columns.build(Chain(blocks), setting.keeping), 10**12)
    assert found is not None and other is not None
    assert found.objective == pytest.approx(other.objective, rel=1e-12)
    assert sum(map(len, found.kept)) == len(blocks) and found.peaks == other.peaks


def test_given_blocks_are_kept_and_no_others() -> None:
    blocks = chain_of(6)
    setting = Setting(cluster(16), Mesh(2, 8, 1), 1, 4, "1f1b", 3, "bf16-mixed")
    kept = {"b1", "b4", "b7"}
    found = gathered.solve(Chain(blocks), setting, 10**12, kept=kept)
    assert found is not None
    assert {blocks[i].name for stage in found.kept for i in stage} == kept
    peak = gathered.least_peak(Chain(blocks), setting, "none", None, kept, 1000)
    fits = {"recompute": "none", "kept": kept}
    assert gathered.solve(Chain(blocks), setting, peak, **fits) is not None
    assert gathered.solve(Chain(blocks), setting, peak - 1, **fits) is None


def test_the_whole_search_keeps_some_blocks_and_says_what_all_resharded_would_cost() -> None:
    provider = synthetic.Provider(synthetic.cluster(8, per_node=8), layers=6, width=4096)
    pins = "tp=1,pp=1,zero=3,shard=8,recompute=none,microbatch=1"

    def choose(reshard: str, gib: float) -> SearchResult:
        options = SearchOptions(
            64, memory_limit=int(gib * 2**30), pins=parse_pins(f"{pins},reshard={reshard}")
        )
        return search(provider, provider.on, options)

    plain, every = choose("all", 1000.0), choose("none", 1000.0)
    assert plain.choice is not None and every.choice is not None
    middle = (max(plain.choice.peaks) + max(every.choice.peaks)) / 2 / 2**30
    found = choose("auto", middle)
    assert found.status == "optimal" and found.choice is not None
    kept = [name for stage in found.choice.stages for name in stage.keep_gathered]
    assert 0 < len(kept) < len(provider.block_names)
    assert every.choice.step_seconds < found.choice.step_seconds < plain.choice.step_seconds
    beside = {n.change: n for n in found.neighbours}
    same = beside["all blocks resharded"].choice
    assert same is not None and same.step_seconds == plain.choice.step_seconds
    told = kept_gathered(found.choice)["kept_gathered"]
    assert told["seconds"] == pytest.approx(
        plain.choice.step_seconds - found.choice.step_seconds, rel=1e-9
    )
    given = choose("+".join(n for n in provider.block_names if n not in kept), middle)
    assert given.choice is not None
    assert given.choice.step_seconds == pytest.approx(found.choice.step_seconds, rel=1e-12)
    # The least memory for these blocks is what they take.
    names = "+".join(n for n in provider.block_names if n not in kept)
    options = SearchOptions(64, memory_limit=1, pins=parse_pins(f"{pins},reshard={names}"))
    legal = legal_settings(provider, provider.on, options)[0]
    least = smallest_memory(Prices(provider), legal, options)
    assert least is not None and max(least.peaks) == max(given.choice.peaks)
