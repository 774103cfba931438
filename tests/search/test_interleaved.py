"""Interleaved 1F1B against enumeration by another route: the evaluator alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from autopar.block_cost import FULL, with_last_holders
from autopar.cost.evaluate import Evaluation, evaluate_setting
from autopar.cost.pipeline import actions
from autopar.cost.setting import Setting
from autopar.interleaving import refused
from autopar.mesh import Mesh
from autopar.plan_document import StagePlan
from autopar.search.bounds import bound, cut_seconds
from autopar.search.chain import Chain
from autopar.search.interleaved import least_peak, solve
from tests.search.test_stages import NUMBERS, block, cluster, ties

# Sets of ops: part of the forward's seconds, bytes kept, and rebuilt.
SOME = ((0.2, 40, 30), (0.5, 20, 60))


def every_size(blocks: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Of the parts of all cuts."""
    for inner in combinations(range(1, blocks), parts - 1):
        edges = (0, *inner, blocks)
        yield tuple(b - a for a, b in pairwise(edges))


def evaluated(blocks, setting, sizes, labels) -> Evaluation:
    """`labels`: how each recomputed block is, by its index."""
    names = [b.name for b in blocks]
    edges = np.cumsum([0, *sizes]).tolist()
    parts = [
        StagePlan(
            tuple(names[a:b]),
            tuple(names[i] for i in range(a, b) if labels.get(i) == FULL),
            {names[i]: labels[i] for i in range(a, b) if labels.get(i, FULL) != FULL},
        )
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    return evaluate_setting(setting, parts, blocks)


def extra_of(block, label, setting) -> float:
    """What recomputing a block adds to a step of one micro-batch, by the evaluator."""
    alone = replace(setting, mesh=Mesh(1, setting.mesh.dp, 1), chunks=1, schedule="1f1b")
    with_, without = (
        evaluated([block], alone, [1], labels).stage_seconds[0] for labels in ({0: label}, {})
    )
    return with_ - without


def corners(block, setting):
    """(seconds per byte, label) from one corner of the hull of a block's options to the next."""
    points = [(0, 0.0, None)]
    for option in block.options:
        freed = block.saved_bytes - option.kept
        points.append((freed, extra_of(block, option.label, setting), option.label))
    at, found = points[0], []
    while True:
        ahead = [(p[1] - at[1], p) for p in points if p[0] > at[0]]
        if not ahead:
            return found
        # The flattest way on; of several the farthest, but what frees more for less comes first.
        slope, _, at = min(((s / (p[0] - at[0]), -p[0], p) for s, p in ahead), key=lambda x: x[:2])
        found.append((slope, at[2]))


def beginnings(blocks, setting, sizes, rank):
    """How the blocks of one rank may be recomputed, from not at all to all that is useful."""
    pp, chunks = setting.mesh.pp, setting.chunks
    edges = np.cumsum([0, *sizes]).tolist()
    order = actions("interleaved", pp, setting.microbatches, chunks)[rank]
    most = [0] * chunks
    live = [0] * chunks
    for action in order:
        live[action.chunk] += 1 if action.kind == "F" else -1
        most[action.chunk] = max(most[action.chunk], live[action.chunk])
    ranked = []
    for c in range(chunks):
        part = c * pp + rank
        for i in range(edges[part], edges[part + 1]):
            for step, (slope, label) in enumerate(corners(blocks[i], setting)):
                ranked.append((slope / most[c], c, step, i, label))
    labels = {}
    yield dict(labels)
    for _, _, _, i, label in sorted(ranked, key=lambda r: r[:4]):
        labels[i] = label
        yield dict(labels)


def brute_force(blocks, setting, limit):
    best = None
    pp = setting.mesh.pp
    for sizes in every_size(len(blocks), pp * setting.chunks):
        owner = [part % pp for part, size in enumerate(sizes) for _ in range(size)]
        part_of = [part for part, size in enumerate(sizes) for _ in range(size)]
        holders = {(t.group, owner[i], part_of[i]) for i, b in enumerate(blocks) for t in b.tied}
        if len({place[:2] for place in holders}) < len(holders):
            continue  # two parts of one rank would each hold a copy
        if len({p for p, b in zip(part_of, blocks, strict=True) if b.parameters}) < len(sizes):
            continue  # a part without parameters
        again: dict[int, str] = {}
        for rank in range(pp):
            for labels in beginnings(blocks, setting, sizes, rank):
                seen = evaluated(blocks, setting, sizes, labels)
                if seen.memory_per_stage[rank].total <= limit:
                    again |= labels
                    break
            else:
                break
        else:
            seen = evaluated(blocks, setting, sizes, again)
            assert seen.peak_bytes <= limit
            if best is None or seen.step_seconds < best:
                best = seen.step_seconds
    return best


def assert_as_evaluated(found, blocks, setting):
    """The evaluator agrees with the time and memory of a solution."""
    labels = {i: FULL for part in found.recompute for i in part}
    labels |= {i: label for part in found.partial for i, label in part.items()}
    seen = evaluated(blocks, setting, np.diff(found.cuts).tolist(), labels)
    assert seen.step_seconds == pytest.approx(found.objective, rel=1e-9)
    assert tuple(m.total for m in seen.memory_per_stage) == found.peaks


@settings(max_examples=200, deadline=None, phases=[Phase.generate])
@given(
    rows=st.lists(NUMBERS, min_size=4, max_size=8),
    pp=st.integers(2, 3),
    chunks=st.integers(2, 3),
    microbatches=st.integers(2, 7),
    dp=st.integers(1, 2),
    zero=st.integers(0, 3),
    fraction=st.floats(0.2, 1.0),
    tied=st.sampled_from([0, 30]),
    inner=st.sampled_from([(), (1, 2), (0, 1), (2, 3, 4)]),
    partial=st.sampled_from([(), SOME]),
)
def test_equals_brute_force(
    rows, pp, chunks, microbatches, dp, zero, fraction, tied, inner, partial
):
    assume(pp * chunks <= len(rows) and not refused(pp, microbatches))
    blocks = with_last_holders(
        [
            block(i, n, ties(i, len(rows) - 1, tied, inner), False, partial[: i % 3])
            for i, n in enumerate(rows)
        ]
    )
    mesh = Mesh(pp, dp, 1)
    setting = Setting(
        cluster(mesh.size),
        mesh,
        1,
        microbatches,
        "interleaved",
        zero if dp > 1 else 0,
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
    assert found.bound == pytest.approx(found.objective, rel=1e-9)
    for kind in ({}, {"sums": True}, {"exact": True}):
        least = cut_seconds(chain, setting, limit, **kind)
        assert least <= found.objective * (1 + 1e-9)
        assert cut_seconds(chain, setting, limit, least, **kind) <= found.objective * (1 + 1e-9)
    least = bound(chain, setting)
    assert least.seconds <= found.objective * (1 + 1e-9)
    assert least.peak <= max(found.peaks)
    smallest = least_peak(chain, setting, "auto", None)
    assert smallest is not None and smallest <= max(found.peaks)
    assert solve(chain, setting, smallest) is not None
    assert solve(chain, setting, smallest - 1) is None
    assert_as_evaluated(found, blocks, setting)
    for recompute in ("none", "selective", "full"):
        pinned = solve(chain, setting, limit, recompute=recompute)
        if pinned is not None:
            assert_as_evaluated(pinned, blocks, setting)
            assert max(pinned.peaks) <= limit
            again = [len(part) for part in pinned.recompute]
            assert recompute == "full" or not any(again)
            assert recompute != "full" or sum(again) == len(blocks)
            assert recompute == "selective" or not any(pinned.partial)
    assert solve(chain, setting, limit, cutoff=found.objective) is None
