"""Lower bounds hold for every division of a block's seconds into forward and backward."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.cost.setting import Practice, Setting
from autopar.mesh import Mesh
from autopar.search.bounds import bound
from autopar.search.chain import Chain
from tests.search.synthetic import Provider, cluster

PARTS = st.tuples(*[st.floats(0.0, 1.0)] * 4)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    zero=st.integers(0, 3),
    microbatches=st.integers(1, 3),
    pp=st.sampled_from([1, 2]),
    parts=st.lists(PARTS, min_size=4, max_size=4),
    scale=st.sampled_from([0.01, 1.0, 30.0]),
    practice=st.builds(Practice, st.booleans(), st.booleans()),
    groups=st.sampled_from([1, 2, 4]),
    per_node=st.sampled_from([2, 8]),
)
def test_a_sum_bounds_all_its_divisions(
    zero, microbatches, pp, parts, scale, practice, groups, per_node
):
    on = cluster(16, per_node=per_node)
    mesh = Mesh(pp, 16 // pp, 1, dp_replicate=groups if zero else 1)
    setting = Setting(on, mesh, 1, microbatches, zero=zero, practice=practice)
    blocks = [
        replace(
            block,
            forward_compute=block.seconds * scale * a,
            backward_compute=block.seconds * scale * b,
            forward_comm=block.seconds * scale * c,
            backward_comm=block.seconds * scale * d,
        )
        for block, (a, b, c, d) in zip(
            Provider(on, layers=2).blocks(1, 1, split=False), parts, strict=True
        )
    ]
    sums = [
        replace(
            b, forward_compute=b.seconds, backward_compute=0.0, forward_comm=0.0, backward_comm=0.0
        )
        for b in blocks
    ]
    known = bound(Chain(blocks), setting).seconds
    assert bound(Chain(sums), setting, sums=True).seconds <= known * (1 + 1e-12)
