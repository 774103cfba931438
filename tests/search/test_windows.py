"""Windows hold every plan below their target that fits, and nothing is below the bound."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.block_cost import BlockCost
from autopar.cluster import Cluster, Device, Link
from autopar.cost.setting import Setting
from autopar.mesh import Mesh
from autopar.search import columns, windows
from autopar.search.windows import Reach

DEVICE = Device("unit", 10**9, 1e9, {"float32": 1e12}, 1.0, 1.0, 0.0, 0)
BLOCK = BlockCost("b", "k", 0.01, 0.02, 0.0, 0.0, 1.0, 10, 10, 50, 10, 5, 5)


def tables(sizes: list[int], pp: int, m: int) -> columns.Columns:
    """Blocks whose time, parameters and activations grow with their sizes."""
    blocks = [
        replace(
            BLOCK,
            name=f"b{i}",
            forward_compute=0.01 * size,
            backward_compute=0.02 * size,
            parameters=10 * size,
            trainable=10 * size,
            saved_bytes=50 * size,
        )
        for i, size in enumerate(sizes)
    ]
    on = Cluster("unit", DEVICE, 1, pp, (Link("link", pp, 1e6, 1e-5),))
    return columns.build(blocks, Setting(on, Mesh(pp, 1, 1), 1, m))


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=4, max_size=8),
    pp=st.integers(1, 4),
    m=st.integers(1, 6),
    above=st.floats(0.9, 2.0),
    room=st.floats(0.2, 1.2),
)
def test_every_plan_below_the_target_that_fits_is_inside(sizes, pp, m, above, room):
    table = tables(sizes, pp, m)
    limit = int(room * table.memory.peak(0, 0, len(sizes), ()))
    reach = Reach(table, limit, table.kept)
    target = reach.bound * above
    found = reach.below(target)
    for inner in itertools.combinations(range(1, len(sizes)), pp - 1):
        spans = list(itertools.pairwise((0, *inner, len(sizes))))
        seconds = [float(table.seconds[span]) for span in spans]
        step = sum(seconds) + (m - 1) * max(seconds) + max(float(table.end[s]) for s in spans)
        assert step >= reach.bound * (1 - 1e-9)
        # With all blocks recomputed a plan may fit that does not without.
        kinds = [[table.ways[int(s)].kind for s in table.which[a:b]] for a, b in spans]
        least = min_peaks(table, spans, kinds)
        if step < target and least <= limit:
            assert found is not None
            for first, (a, b) in zip(found.first, spans, strict=True):
                assert first <= b - 1 < first + found.side and b - a <= found.most


def min_peaks(table: columns.Columns, spans: list[tuple[int, int]], kinds: list[list[int]]) -> int:
    """Bytes of the fullest stage, with nothing or everything recomputed, whichever is less."""
    return max(
        min(table.memory.peak(i, *span, ()), table.memory.peak(i, *span, kinds[i]))
        for i, span in enumerate(spans)
    )


def test_a_near_target_leaves_few_intervals_of_a_long_chain():
    reach = Reach(tables([3] * 400, 40, 100), 10**9, tables([3] * 400, 40, 100).kept)
    near, every = reach.below(reach.bound * 1.05), reach.below(float("inf"))
    assert near is not None and every is not None
    assert near.cells < every.cells / 100
    assert near.most < 20


def test_given_starts_are_the_only_window():
    assert windows.given((0, 1, 4), 6) == windows.Windows((0, 3, 5), 1, 3)
