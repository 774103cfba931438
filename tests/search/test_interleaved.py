"""Interleaved 1F1B against enumeration by another route: the evaluator alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

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


def sizes_of(blocks: int, parts: int, pp: int) -> set[tuple[int, ...]]:
    """The family as its text tells it, by trying all sizes."""
    most = -(-blocks // parts) + 2
    found = set()
    for first, last in product(range(1, most + 1), repeat=2):
        rest, between = blocks - first - last, parts - 2
        if rest < between:
            continue
        share, more = divmod(rest, between)
        for start in range(min(pp, between)):
            middle = [share] * between
            for i in range(more):
                middle[(start + i) % between] += 1
            found.add((first, *middle, last))
    return found


def evaluated(blocks, setting, sizes, again) -> Evaluation:
    names = [b.name for b in blocks]
    edges = np.cumsum([0, *sizes]).tolist()
    parts = [
        StagePlan(tuple(names[a:b]), tuple(n for n in names[a:b] if n in again))
        for a, b in zip(edges, edges[1:], strict=False)
    ]
    return evaluate_setting(setting, parts, blocks)


def extra_of(block, setting) -> float:
    """What recomputing a block adds to a step of one micro-batch, by the evaluator."""
    alone = replace(setting, mesh=Mesh(1, setting.mesh.dp, 1), chunks=1, schedule="1f1b")
    held = (block.name,)
    with_, without = (
        evaluate_setting(alone, [StagePlan(held, again)], [block]).stage_seconds[0]
        for again in (held, ())
    )
    return with_ - without


def beginnings(blocks, setting, sizes, rank):
    """The sets of blocks of one rank that may be recomputed, from none to all useful ones."""
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
            gain = blocks[i].saved_bytes - blocks[i].input_bytes
            if gain > 0:
                ranked.append((extra_of(blocks[i], setting) / (gain * most[c]), i))
    names = [blocks[i].name for _, i in sorted(ranked)]
    return [names[:k] for k in range(len(names) + 1)]


def brute_force(blocks, setting, limit):
    best = None
    pp = setting.mesh.pp
    for sizes in sizes_of(len(blocks), pp * setting.chunks, pp):
        owner = [part % pp for part, size in enumerate(sizes) for _ in range(size)]
        part_of = [part for part, size in enumerate(sizes) for _ in range(size)]
        holders = {(t.group, owner[i], part_of[i]) for i, b in enumerate(blocks) for t in b.tied}
        if len({place[:2] for place in holders}) < len(holders):
            continue  # two parts of one rank would each hold a copy
        if len({p for p, b in zip(part_of, blocks, strict=True) if b.parameters}) < len(sizes):
            continue  # a part without parameters
        again: list[str] = []
        for rank in range(pp):
            for names in beginnings(blocks, setting, sizes, rank):
                seen = evaluated(blocks, setting, sizes, names)
                if seen.memory_per_stage[rank].total <= limit:
                    again += names
                    break
            else:
                break
        else:
            seen = evaluated(blocks, setting, sizes, again)
            assert seen.peak_bytes <= limit
            if best is None or seen.step_seconds < best:
                best = seen.step_seconds
    return best


@settings(max_examples=400, deadline=None, phases=[Phase.generate])
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
)
def test_equals_brute_force(rows, pp, chunks, microbatches, dp, zero, fraction, tied, inner):
    assume(pp * chunks <= len(rows) and not refused(pp, microbatches))
    blocks = [block(i, n, ties(i, len(rows) - 1, tied, inner)) for i, n in enumerate(rows)]
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
    sizes = np.diff(found.cuts).tolist()
    again = {blocks[i].name for part in found.recompute for i in part}
    seen = evaluated(blocks, setting, sizes, again)
    assert seen.step_seconds == pytest.approx(found.objective, rel=1e-9)
    assert tuple(m.total for m in seen.memory_per_stage) == found.peaks
    assert solve(chain, setting, limit, cutoff=found.objective) is None
